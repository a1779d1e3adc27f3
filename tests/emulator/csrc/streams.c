/* Streams and events. In deferred mode work waits until somebody synchronizes or asks, so that a missing wait shows. */
#include "streams.h"

#include <stdlib.h>
#include <string.h>

#include "model.h"

typedef enum { COPY, PREFETCH, RECORD, WAIT } What;
typedef struct Op { What what; uintptr_t a, b; size_t size; int where; struct Event *event; struct Op *next; } Op;
struct Stream { Op *first, *last; double clock; struct Stream *next; }; /* the clock: seconds of work so far */
struct Event { struct Stream *on; int pending, queued, dropped; double time; struct Event *next; };

static struct Stream default_stream, *streams;
static struct Event *events;
static int deferred;

void emu_defer(int yes) { deferred = yes; }

static struct Stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= 2) return &default_stream; /* null, legacy and per-thread default */
    for (struct Stream *s = streams; s; s = s->next)
        if (s == handle) return s;
    return NULL;
}

static struct Event *event_of(void *handle) {
    for (struct Event *e = events; e; e = e->next)
        if (e == handle && !e->dropped) return e;
    return NULL;
}

/* Records and waits that are queued outlive the event, as with CUDA. */
static void event_free(struct Event *gone) {
    if (!gone->dropped || gone->queued) return;
    for (struct Event **at = &events; *at; at = &(*at)->next)
        if (*at == gone) { *at = gone->next; free(gone); return; }
}

static int step(struct Stream *stream);

static void drain_until(struct Event *event) {
    while (event->pending && event->on && step(event->on)) {}
}

static void run(struct Stream *stream, Op *op) {
    switch (op->what) {
        case COPY:
            memmove((void *)op->a, (void *)op->b, op->size);
            stream->clock += copy_seconds(op->a, op->b, op->size);
            emu_copies++;
            break;
        case PREFETCH: pages_move(op->a, op->size, op->where, 1); emu_prefetches++; break;
        case RECORD:
            op->event->pending--, op->event->queued--, op->event->time = stream->clock;
            event_free(op->event);
            break;
        case WAIT:
            drain_until(op->event);
            if (op->event->time > stream->clock) stream->clock = op->event->time;
            op->event->queued--;
            event_free(op->event);
            break;
    }
}

static int step(struct Stream *stream) {
    Op *op = stream->first;
    if (!op) return 0;
    stream->first = op->next;
    if (!stream->first) stream->last = NULL;
    run(stream, op);
    free(op);
    return 1;
}

static int queue(void *handle, Op op) {
    struct Stream *stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    Op *copy = malloc(sizeof *copy);
    *copy = op;
    copy->next = NULL;
    if (stream->last) stream->last->next = copy; else stream->first = copy;
    stream->last = copy;
    if (!deferred) while (step(stream)) {}
    return OK;
}

int stream_copy(void *s, uintptr_t to, uintptr_t from, size_t size) {
    return queue(s, (Op){.what = COPY, .a = to, .b = from, .size = size});
}
int stream_prefetch(void *s, uintptr_t at, size_t size, int where) {
    return queue(s, (Op){.what = PREFETCH, .a = at, .size = size, .where = where});
}

int stream_make(void **out) {
    struct Stream *stream = calloc(1, sizeof *stream);
    stream->next = streams, streams = stream, *out = stream;
    return OK;
}

int stream_drop(void *handle) {
    for (struct Stream **at = &streams; *at; at = &(*at)->next)
        if (*at == handle) {
            struct Stream *gone = *at;
            while (step(gone)) {}
            *at = gone->next;
            for (struct Event *e = events; e; e = e->next) if (e->on == gone) e->on = NULL;
            free(gone);
            return OK;
        }
    return INVALID_HANDLE;
}

int stream_finish(void *handle) {
    struct Stream *stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    while (step(stream)) {}
    return OK;
}

int stream_busy(void *handle) {
    struct Stream *stream = stream_of(handle);
    return stream && step(stream) && stream->first;
}

void streams_finish(void) {
    while (step(&default_stream)) {}
    for (struct Stream *s = streams; s; s = s->next) while (step(s)) {}
}

int event_make(void **out) {
    struct Event *event = calloc(1, sizeof *event);
    event->next = events, events = event, *out = event;
    return OK;
}

int event_drop(void *handle) {
    struct Event *event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    event->dropped = 1;
    event_free(event);
    return OK;
}

int event_record(void *handle, void *s) {
    struct Event *event = event_of(handle);
    struct Stream *stream = stream_of(s);
    if (!event || !stream) return INVALID_HANDLE;
    event->on = stream, event->pending++, event->queued++;
    return queue(s, (Op){.what = RECORD, .event = event});
}

int event_query(void *handle) {
    struct Event *event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    if (event->pending && event->on) step(event->on);
    return event->pending ? NOT_READY : OK;
}

int event_finish(void *handle) {
    struct Event *event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    drain_until(event);
    return OK;
}

int event_await(void *s, void *handle) {
    struct Event *event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    event->queued++;
    return queue(s, (Op){.what = WAIT, .event = event});
}

unsigned long emu_streams(void) {
    unsigned long n = 0;
    for (struct Stream *s = streams; s; s = s->next) n++;
    return n;
}
unsigned long emu_events(void) {
    unsigned long n = 0;
    for (struct Event *e = events; e; e = e->next) n += !e->dropped;
    return n;
}

int event_elapsed(float *out, void *first, void *second) {
    struct Event *a = event_of(first), *b = event_of(second);
    if (!a || !b) return INVALID_HANDLE;
    if (a->pending || b->pending) return NOT_READY;
    *out = (float)((b->time - a->time) * 1000);
    return OK;
}
