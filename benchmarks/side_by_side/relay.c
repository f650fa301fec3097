/* The network between hosts that are network namespaces of this machine.
 *
 *   relay RATE_MBIT LATENCY_MS FD...
 *
 * Each FD is the TUN device of a host; host i has the address 10.78.0.(i + 1). A packet keeps its sender's uplink and
 * its receiver's downlink for as long as its bytes take at the rate, one packet at a time on each, and arrives a latency
 * later. Connections that wait for a link take turns, byte for byte (deficit round robin, as Linux's fq_codel), so that
 * an acknowledgement does not queue behind another connection's data. Nothing is lost. Runs until it is killed. */
#define _GNU_SOURCE /* ppoll */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_HOSTS = 64, LARGEST_PACKET = 65536, BATCH = 16, FLOWS = 4096, QUANTUM = 9000 };
enum { SOURCE = 12, DESTINATION = 16, HEADER = 20, PORTS = 4 };

typedef struct Packet {
  struct Packet *next;
  int64_t time_ns; /* when it came to the link; later, when it arrives */
  int target, flow, size;
  unsigned char bytes[];
} Packet;

typedef struct {
  Packet *first, *last;
} Queue;

typedef struct {
  Queue queue[FLOWS];
  int deficit[FLOWS], next[FLOWS]; /* the flows that wait, in a ring in the order of their turns */
  int current, last, waiting;
  int64_t free_ns;
} Link;

typedef struct {
  struct pollfd device[MOST_HOSTS];
  Link up[MOST_HOSTS], down[MOST_HOSTS];
  Queue arriving[MOST_HOSTS];
  int hosts;
  double ns_per_byte;
  int64_t latency_ns;
} Network;

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static void append(Queue *queue, Packet *packet) {
  packet->next = NULL;
  if (queue->first) queue->last->next = packet;
  else queue->first = packet;
  queue->last = packet;
}

static Packet *take(Queue *queue) {
  Packet *packet = queue->first;
  queue->first = packet->next;
  return packet;
}

/* Let a packet wait for a link. A flow that did not wait gets a turn at once, behind the current one. */
static void wait_for(Link *link, Packet *packet, int64_t time_ns) {
  int flow = packet->flow;
  packet->time_ns = time_ns;
  if (!link->queue[flow].first) {
    link->deficit[flow] = QUANTUM;
    if (!link->waiting) link->current = link->last = link->next[flow] = flow;
    link->next[flow] = link->next[link->current];
    link->next[link->current] = flow;
    if (link->current == link->last) link->last = flow;
    link->waiting++;
  }
  append(&link->queue[flow], packet);
}

/* The packet whose turn it is. */
static Packet *next_packet(Link *link) {
  while (link->queue[link->current].first->size > link->deficit[link->current]) {
    link->deficit[link->current] += QUANTUM;
    link->last = link->current;
    link->current = link->next[link->current];
  }
  int flow = link->current;
  Packet *packet = take(&link->queue[flow]);
  link->deficit[flow] -= packet->size;
  if (!link->queue[flow].first) { /* leaves the ring */
    link->next[link->last] = link->next[flow];
    link->current = link->next[flow];
    link->waiting--;
  }
  return packet;
}

/* Send what a link can send up to a moment: to the downlink of its target, or to the host. When it goes on, or 0. */
static int64_t transmit(Network *net, Link *link, int is_uplink, int64_t now) {
  while (link->waiting && link->free_ns <= now) {
    Packet *packet = next_packet(link);
    int64_t begin_ns = later(link->free_ns, packet->time_ns);
    link->free_ns = begin_ns + (int64_t)(packet->size * net->ns_per_byte);
    if (is_uplink) { /* the downlink begins with the packet's first byte */
      wait_for(&net->down[packet->target], packet, begin_ns);
    } else {
      packet->time_ns = link->free_ns + net->latency_ns;
      append(&net->arriving[packet->target], packet);
    }
  }
  return link->waiting ? link->free_ns : 0;
}

/* Hand a host what has arrived. When the next packet does, or 0. */
static int64_t deliver(Network *net, int host, int64_t now) {
  Queue *queue = &net->arriving[host];
  while (queue->first && queue->first->time_ns <= now) {
    Packet *packet = take(queue);
    if (write(net->device[host].fd, packet->bytes, packet->size) < 0 && errno != EAGAIN) perror("relay: write");
    free(packet);
  }
  return queue->first ? queue->first->time_ns : 0;
}

/* Connections by addresses and ports; two may share a number, and then share a turn. */
static int flow_of(const unsigned char *bytes, int size) {
  int header = (bytes[0] & 15) * 4;
  uint32_t hash = 2166136261u;
  for (int k = SOURCE; k < HEADER; k++) hash = (hash ^ bytes[k]) * 16777619u;
  for (int k = header; k < header + PORTS && k < size; k++) hash = (hash ^ bytes[k]) * 16777619u;
  return (hash ^ hash >> 16) % FLOWS;
}

static void send_from(Network *net, int host, const unsigned char *bytes, int size) {
  const unsigned char *to = bytes + DESTINATION;
  if (size < HEADER || bytes[0] >> 4 != 4 || to[0] != 10 || to[1] != 78 || to[2] != 0) return;
  if (to[3] < 1 || to[3] > net->hosts) return;
  Packet *packet = malloc(sizeof *packet + size);
  if (!packet) exit(1);
  packet->target = to[3] - 1;
  packet->flow = flow_of(bytes, size);
  packet->size = size;
  memcpy(packet->bytes, bytes, size);
  wait_for(&net->up[host], packet, now_ns());
}

static void sooner(int64_t *next, int64_t time) {
  if (time && (!*next || time < *next)) *next = time;
}

int main(int count, char **words) {
  static Network net;
  static unsigned char bytes[LARGEST_PACKET];
  if (count < 4 || count - 3 > MOST_HOSTS) return 2;
  double rate_mbit = atof(words[1]);
  net.ns_per_byte = rate_mbit > 0 ? 8000.0 / rate_mbit : 0;
  net.latency_ns = (int64_t)(atof(words[2]) * 1e6);
  net.hosts = count - 3;
  for (int host = 0; host < net.hosts; host++) net.device[host] = (struct pollfd){atoi(words[3 + host]), POLLIN, 0};
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_TIMERSLACK, 1);
  for (;;) {
    int64_t now = now_ns(), next = 0;
    for (int host = 0; host < net.hosts; host++) sooner(&next, transmit(&net, &net.up[host], 1, now));
    for (int host = 0; host < net.hosts; host++) {
      sooner(&next, transmit(&net, &net.down[host], 0, now));
      sooner(&next, deliver(&net, host, now));
    }
    int64_t wait_ns = next ? later(0, next - now_ns()) : 0;
    struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
    if (ppoll(net.device, net.hosts, next ? &wait : NULL, NULL) < 0 && errno != EINTR) return 1;
    for (int host = 0; host < net.hosts; host++)
      for (int k = 0; net.device[host].revents & POLLIN && k < BATCH; k++) {
        int size = read(net.device[host].fd, bytes, sizeof bytes);
        if (size <= 0) break;
        send_from(&net, host, bytes, size);
      }
  }
}
