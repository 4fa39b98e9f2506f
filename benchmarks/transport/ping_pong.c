/* The ceiling of a round trip: two processes, one TCP connection, nothing but send and receive.
 *
 *     ping_pong block|spin OUT_BYTES BACK_BYTES STEPS [NAMESPACE ADDRESS]
 *
 * prints the nanoseconds of each step, over loopback, or to an address in another network namespace, which is
 * named by its file. round_trip.py and namespaces.py compile and call it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int flags;  /* MSG_DONTWAIT: spin */

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static void receive(int fd, char* out, size_t bytes) {
  while (bytes > 0) {
    ssize_t got = recv(fd, out, bytes, flags);
    if (got == 0) exit(0);
    if (got < 0 && errno != EAGAIN && errno != EINTR) fail("recv");
    if (got < 0) continue;
    out += got;
    bytes -= (size_t)got;
  }
}

static void send_all(int fd, const char* in, size_t bytes) {
  while (bytes > 0) {
    ssize_t sent = send(fd, in, bytes, flags | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) fail("send");
    if (sent < 0) continue;
    in += sent;
    bytes -= (size_t)sent;
  }
}

/* The host's end keeps the first core that it may use, the worker's the second, where there is one. */
static void keep_core(int number) {
  cpu_set_t allowed, one;
  CPU_ZERO(&one);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) fail("sched_getaffinity");
  number %= CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || number-- != 0) continue;
    CPU_SET(core, &one);
    break;
  }
  if (sched_setaffinity(0, sizeof one, &one) != 0) fail("sched_setaffinity");
}

static long long now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Sockets made from now on are in that namespace. */
static void enter(int namespace) {
  if (namespace < 0 || setns(namespace, CLONE_NEWNET) != 0) fail("namespace");
}

int main(int argc, char** argv) {
  if (argc != 5 && argc != 7) return 2;
  flags = strcmp(argv[1], "spin") == 0 ? MSG_DONTWAIT : 0;
  size_t out_bytes = strtoul(argv[2], NULL, 10), back_bytes = strtoul(argv[3], NULL, 10);
  long steps = strtol(argv[4], NULL, 10), warm_up = 20, one = 1;
  char* buffer = calloc(1, out_bytes > back_bytes ? out_bytes : back_bytes);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  int here = open("/proc/self/ns/net", O_RDONLY);
  if (argc == 7) {
    if (inet_pton(AF_INET, argv[6], &address.sin_addr) != 1) return 2;
    enter(open(argv[5], O_RDONLY));
  }
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (argc == 7) enter(here);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (buffer == NULL || listener < 0 || fd < 0) fail("socket");
  if (bind(listener, (struct sockaddr*)&address, length) != 0 || listen(listener, 1) != 0) fail("listen");
  if (getsockname(listener, (struct sockaddr*)&address, &length) != 0) fail("getsockname");
  if (connect(fd, (struct sockaddr*)&address, length) != 0) fail("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(int));
  pid_t child = fork();
  if (child < 0) fail("fork");
  if (child == 0) {
    keep_core(1);
    close(fd);
    fd = accept(listener, NULL, NULL);
    if (fd < 0) fail("accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(int));
    for (;;) {
      receive(fd, buffer, out_bytes);
      send_all(fd, buffer, back_bytes);
    }
  }
  keep_core(0);
  for (long step = -warm_up; step < steps; ++step) {
    long long start = now_ns();
    send_all(fd, buffer, out_bytes);
    receive(fd, buffer, back_bytes);
    if (step >= 0) printf("%lld\n", now_ns() - start);
  }
  close(fd);
  waitpid(child, NULL, 0);
  return 0;
}
