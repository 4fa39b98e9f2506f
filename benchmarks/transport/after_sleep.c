/* What sleep alone does to the first step after it: two processes, one TCP connection over loopback, memory that
 * both read, and nothing else.
 *
 *     after_sleep IDLE_S OUT_BYTES BACK_BYTES EXCHANGES WALK_BYTES WARM_STEPS
 *
 * For each line of input it sleeps, and prints the nanoseconds of the step that comes then, and of WARM_STEPS
 * after it. A step is EXCHANGES times: read WALK_BYTES of this process's memory, one number of every cache line,
 * send, have the other process do the same, receive. idle.py compiles and calls it. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile long sum;

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static int receive(int fd, char* out, size_t bytes) {
  while (bytes > 0) {
    ssize_t got = recv(fd, out, bytes, 0);
    if (got == 0) return 0;
    if (got < 0 && errno != EINTR) fail("recv");
    if (got < 0) continue;
    out += got;
    bytes -= (size_t)got;
  }
  return 1;
}

static void send_all(int fd, const char* in, size_t bytes) {
  while (bytes > 0) {
    ssize_t sent = send(fd, in, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR) fail("send");
    if (sent < 0) continue;
    in += sent;
    bytes -= (size_t)sent;
  }
}

static void walk(const char* memory, size_t bytes) {
  long local = 0;
  for (size_t at = 0; at < bytes; at += 64) local += memory[at];
  sum = local;
}

static long long now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  double idle_s = strtod(argv[1], NULL);
  size_t out_bytes = strtoul(argv[2], NULL, 10), back_bytes = strtoul(argv[3], NULL, 10);
  long exchanges = strtol(argv[4], NULL, 10), warm_steps = strtol(argv[6], NULL, 10);
  size_t walk_bytes = strtoul(argv[5], NULL, 10);
  size_t memory_bytes = walk_bytes * (size_t)exchanges;
  char* buffer = calloc(1, out_bytes > back_bytes ? out_bytes : back_bytes);
  char* memory = malloc(memory_bytes);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  int listener = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  if (buffer == NULL || memory == NULL || listener < 0 || fd < 0) fail("socket");
  if (bind(listener, (struct sockaddr*)&address, length) != 0 || listen(listener, 1) != 0) fail("listen");
  if (getsockname(listener, (struct sockaddr*)&address, &length) != 0) fail("getsockname");
  if (connect(fd, (struct sockaddr*)&address, length) != 0) fail("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  pid_t child = fork();
  if (child < 0) fail("fork");
  memset(memory, 1, memory_bytes); /* after the fork: each has its own */
  if (child == 0) {
    close(fd);
    fd = accept(listener, NULL, NULL);
    if (fd < 0) fail("accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    for (long exchange = 0; receive(fd, buffer, out_bytes); exchange = (exchange + 1) % exchanges) {
      walk(memory + (size_t)exchange * walk_bytes, walk_bytes);
      send_all(fd, buffer, back_bytes);
    }
    return 0;
  }
  while (getchar() != EOF) {
    for (long step = -warm_steps; step <= warm_steps; ++step) { /* warm, sleep, first, warm */
      struct timespec idle = {(time_t)idle_s, (long)((idle_s - (double)(long)idle_s) * 1e9)};
      if (step == 0) nanosleep(&idle, NULL);
      long long start = now_ns();
      for (long exchange = 0; exchange < exchanges; ++exchange) {
        walk(memory + (size_t)exchange * walk_bytes, walk_bytes);
        send_all(fd, buffer, out_bytes);
        if (!receive(fd, buffer, back_bytes)) return 1;
      }
      if (step >= 0) printf("%lld ", now_ns() - start);
    }
    printf("\n");
    fflush(stdout);
  }
  close(fd);
  waitpid(child, NULL, 0);
  return 0;
}
