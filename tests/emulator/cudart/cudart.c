/* An emulated CUDA runtime over the emulated driver: enough for stock CUDA torch to allocate, copy, pin and pool.
 * Kernels are refused. Whatever is not written here is a generated stub that returns "not supported". */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int Error;
enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801, NOT_READY = 600 };

/* the emulated driver's */
extern int cuInit(unsigned), cuDeviceGetCount(int *), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
extern int cuCtxGetCurrent(void **), cuMemAlloc_v2(uintptr_t *, size_t), cuMemFree_v2(uintptr_t);
extern int cuMemGetInfo_v2(size_t *, size_t *), cuMemHostRegister_v2(void *, size_t, unsigned), cuMemHostUnregister(void *);
extern int cuStreamCreate(void **, unsigned), cuStreamDestroy_v2(void *), cuStreamSynchronize(void *);
extern int cuStreamWaitEvent(void *, void *, unsigned), cuEventCreate(void **, unsigned), cuEventDestroy_v2(void *);
extern int cuEventRecord(void *, void *), cuEventQuery(void *), cuEventSynchronize(void *), cuCtxSynchronize(void);
extern int cuMemcpyAsync(uintptr_t, uintptr_t, size_t, void *), cuPointerGetAttribute(void *, int, uintptr_t);
extern int cuDeviceGetAttribute(int *, int, int), cuDeviceTotalMem_v2(size_t *, int), cuDriverGetVersion(int *);
extern int cuDeviceGetName(char *, int, int), cuMemHostAlloc(void **, size_t, unsigned), cuMemFreeHost(void *);
extern int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);

static __thread int device;
static __thread Error last;

Error emu_unsupported(const char *name) {
    if (getenv("GH200_EMU_TRACE")) dprintf(2, "emulated runtime: %s\n", name);
    return last = NOT_SUPPORTED;
}
static Error keep(Error code) { if (code && code != NOT_READY) last = code; return code; }
static Error ready(void) {
    void *context;
    int code = cuInit(0);
    if (code) return keep(code);
    if ((code = cuCtxGetCurrent(&context))) return keep(code);
    if (context) return SUCCESS;
    if ((code = cuDevicePrimaryCtxRetain(&context, device))) return keep(code);
    return keep(cuCtxSetCurrent(context));
}
#define WITH(call) do { Error r_ = ready(); return r_ ? r_ : keep(call); } while (0)

Error cudaGetLastError(void) { Error was = last; last = SUCCESS; return was; }
Error cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(Error code) { return code == NOT_SUPPORTED ? "cudaErrorNotSupported" : code ? "cudaError" : "cudaSuccess"; }
const char *cudaGetErrorString(Error code) { return code == NOT_SUPPORTED ? "the emulated runtime refuses this" : "emulated error"; }
Error cudaRuntimeGetVersion(int *out) { *out = RUNTIME_VERSION; return SUCCESS; }
Error cudaDriverGetVersion(int *out) { return cuDriverGetVersion(out); }
Error cudaGetDeviceCount(int *out) { int code = cuInit(0); return keep(code ? code : cuDeviceGetCount(out)); }
Error cudaGetDevice(int *out) { *out = device; return SUCCESS; }
Error cudaSetDevice(int wanted) { device = wanted; return ready(); }
Error cudaInitDevice(int wanted, unsigned a, unsigned b) { (void)a, (void)b; device = wanted; return ready(); }
Error cudaDeviceGetAttribute(int *out, int attribute, int dev) { WITH(cuDeviceGetAttribute(out, attribute, dev)); }
Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}
static Error properties(char *out, int dev) {
    Error code = ready();
    if (code) return code;
    memset(out, 0, 768);
    cuDeviceGetName(out, 256, dev);
    cuDeviceTotalMem_v2((size_t *)(out + 288), dev);
    *(size_t *)(out + 296) = 49152;
    *(int *)(out + 304) = 65536, *(int *)(out + 308) = 32, *(int *)(out + 320) = 1024;
    *(int *)(out + 360) = 9, *(int *)(out + 364) = 0;
    *(int *)(out + 384) = 132, *(int *)(out + 388) = 132;
    return SUCCESS;
}
Error cudaGetDeviceProperties(char *out, int dev) { return properties(out, dev); }
Error cudaGetDeviceProperties_v2(char *out, int dev) { return properties(out, dev); }
Error cudaDeviceCanAccessPeer(int *out, int a, int b) { *out = a == b; return SUCCESS; }
Error cudaDeviceSynchronize(void) { WITH(cuCtxSynchronize()); }

Error cudaMalloc(void **out, size_t size) { WITH(cuMemAlloc_v2((uintptr_t *)out, size)); }
Error cudaFree(void *at) { if (!at) return ready(); WITH(cuMemFree_v2((uintptr_t)at)); }
Error cudaMemGetInfo(size_t *free_, size_t *total) { WITH(cuMemGetInfo_v2(free_, total)); }
Error cudaHostAlloc(void **out, size_t size, unsigned flags) { (void)flags; WITH(cuMemHostAlloc(out, size, 3)); }
Error cudaFreeHost(void *at) { WITH(cuMemFreeHost(at)); }
Error cudaHostRegister(void *at, size_t size, unsigned flags) { WITH(cuMemHostRegister_v2(at, size, flags)); }
Error cudaHostUnregister(void *at) { WITH(cuMemHostUnregister(at)); }
Error cudaHostGetDevicePointer(void **out, void *at, unsigned flags) { (void)flags; *out = at; return SUCCESS; }
typedef struct { int type, device; void *on_device, *on_host; } PointerAttributes;
Error cudaPointerGetAttributes(PointerAttributes *out, const void *at) {
    int kind, managed, code = ready();
    memset(out, 0, sizeof *out);
    if (code || cuPointerGetAttribute(&kind, 2, (uintptr_t)at)) return code; /* memory CUDA doesn't know: type 0 */
    cuPointerGetAttribute(&managed, 8, (uintptr_t)at);
    out->type = managed ? 3 : kind, out->on_device = (void *)at;
    out->on_host = managed || kind == 1 ? (void *)at : NULL;
    return SUCCESS;
}
Error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    (void)kind;
    if (!size) return SUCCESS;
    WITH(cuMemcpyAsync((uintptr_t)to, (uintptr_t)from, size, stream));
}
Error cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    Error code = cudaMemcpyAsync(to, from, size, kind, NULL);
    return code ? code : keep(cuStreamSynchronize(NULL));
}
Error cudaMemsetAsync(void *at, int value, size_t size, void *stream) {
    Error code = ready();
    if (code || (code = cuStreamSynchronize(stream))) return keep(code);
    memset(at, value, size);
    return SUCCESS;
}
Error cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size, NULL); }

Error cudaStreamCreateWithPriority(void **out, unsigned flags, int p) { (void)p; WITH(cuStreamCreate(out, flags)); }
Error cudaStreamCreateWithFlags(void **out, unsigned flags) { WITH(cuStreamCreate(out, flags)); }
Error cudaStreamCreate(void **out) { WITH(cuStreamCreate(out, 0)); }
Error cudaStreamDestroy(void *stream) { WITH(cuStreamDestroy_v2(stream)); }
Error cudaStreamSynchronize(void *stream) { WITH(cuStreamSynchronize(stream)); }
Error cudaStreamQuery(void *stream) { WITH(cuStreamSynchronize(stream)); }
Error cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { WITH(cuStreamWaitEvent(stream, event, flags)); }
Error cudaStreamIsCapturing(void *stream, int *out) { (void)stream; *out = 0; return SUCCESS; }
Error cudaStreamGetCaptureInfo(void *stream, int *out, unsigned long long *id) {
    (void)stream;
    *out = 0;
    if (id) *id = 0;
    return SUCCESS;
}
Error cudaStreamGetCaptureInfo_v2(void *stream, int *out, unsigned long long *id) { return cudaStreamGetCaptureInfo(stream, out, id); }
Error cudaStreamGetCaptureInfo_v3(void *stream, int *out, unsigned long long *id) { return cudaStreamGetCaptureInfo(stream, out, id); }
Error cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return SUCCESS; }
Error cudaEventCreateWithFlags(void **out, unsigned flags) { WITH(cuEventCreate(out, flags)); }
Error cudaEventCreate(void **out) { WITH(cuEventCreate(out, 0)); }
Error cudaEventDestroy(void *event) { WITH(cuEventDestroy_v2(event)); }
Error cudaEventRecord(void *event, void *stream) { WITH(cuEventRecord(event, stream)); }
Error cudaEventRecordWithFlags(void *event, void *stream, unsigned f) { (void)f; WITH(cuEventRecord(event, stream)); }
Error cudaEventQuery(void *event) { WITH(cuEventQuery(event)); }
Error cudaEventSynchronize(void *event) { WITH(cuEventSynchronize(event)); }
Error cudaEventElapsedTime(float *out, void *a, void *b) { (void)a, (void)b; *out = 1; return SUCCESS; }

Error cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags, int *status) {
    cuGetProcAddress_v2(name, out, (int)version, flags, status); /* absence is told by the status */
    return SUCCESS;
}
Error cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, out, 12000, flags, status);
}

/* Libraries register their kernels when they are loaded. */
static void *fat_binary[8];
void **__cudaRegisterFatBinary(void *image) { (void)image; return fat_binary; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
void __cudaRegisterManagedVar(void) {}
void __cudaRegisterHostVar(void) {}
void __cudaRegisterTexture(void) {}
void __cudaRegisterSurface(void) {}
char __cudaInitModule(void **handle) { (void)handle; return 1; }
