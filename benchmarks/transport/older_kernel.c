/* Loaded before libc (LD_PRELOAD), makes the kernel look like one before Linux 6.16 to this process: no socket can
 * set TCP's minimum time to retransmit, nor how long an acknowledgement may wait, while `older_kernel` is not 0.
 * It begins as the environment's OLDER_KERNEL says. namespaces.py compiles and loads it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

int older_kernel;

__attribute__((constructor)) static void begin(void) {
  const char* value = getenv("OLDER_KERNEL");
  older_kernel = value != NULL && value[0] == '1';
}

static int is_newer(int level, int option) {
  return level == IPPROTO_TCP && (option == 45 || option == 46); /* TCP_RTO_MIN_US, TCP_DELACK_MAX_US */
}

int setsockopt(int fd, int level, int option, const void* value, socklen_t bytes) {
  static int (*next)(int, int, int, const void*, socklen_t);
  if (older_kernel && is_newer(level, option)) return errno = ENOPROTOOPT, -1;
  if (next == NULL) next = (int (*)(int, int, int, const void*, socklen_t))dlsym(RTLD_NEXT, "setsockopt");
  return next(fd, level, option, value, bytes);
}

int getsockopt(int fd, int level, int option, void* value, socklen_t* bytes) {
  static int (*next)(int, int, int, void*, socklen_t*);
  if (older_kernel && is_newer(level, option)) return errno = ENOPROTOOPT, -1;
  if (next == NULL) next = (int (*)(int, int, int, void*, socklen_t*))dlsym(RTLD_NEXT, "getsockopt");
  return next(fd, level, option, value, bytes);
}
