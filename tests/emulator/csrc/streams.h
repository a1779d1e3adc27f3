/* Ordered work of the emulated driver; every function is called under emu_lock and returns a CUresult. */
#pragma once
#include <stddef.h>
#include <stdint.h>

int stream_make(void **out);
int stream_drop(void *stream);
int stream_finish(void *stream);
int stream_busy(void *stream);
void streams_finish(void);
int stream_copy(void *stream, uintptr_t to, uintptr_t from, size_t size);
int stream_prefetch(void *stream, uintptr_t at, size_t size, int where);
int event_make(void **out);
int event_drop(void *event);
int event_record(void *event, void *stream);
int event_query(void *event);
int event_finish(void *event);
int event_await(void *stream, void *event);
int event_elapsed(float *out, void *first, void *second);
