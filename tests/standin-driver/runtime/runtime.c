/* What a PyTorch for CUDA calls of the runtime and of cuBLAS, over the stand-in driver. It is loaded before both (LD_PRELOAD), so a real PyTorch runs real programs on a pretended
 * device: every allocation, free, stream, event, copy and fill happens, and every kernel is launched and does nothing. So what such programs ask of an allocator is what they ask of
 * it on a device, and what they compute is not.
 *
 * Streams, events and memory are the driver's (STITCHD_DRIVER_LIBRARY names its file): what the client library is told of them is true. A capture records nothing, but what may not happen
 * while one is recorded fails, as it would: allocations by this runtime, and looking at or waiting for what is queued. What is not here is the real runtime's, which says that there is no driver.
 *
 * cc -shared -fPIC -I include -I <PyTorch's packages>/nvidia/cu13/include runtime.c -o libstandin_cudart.so
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The driver, with which this is linked. */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int count;

static void begin(void) {
    if (cuInit(0) != 0 || cuDeviceGetCount(&count) != 0) count = 0;
}
static int devices(void) {
    pthread_once(&once, begin);
    return count;
}

/* Errors: the driver's numbers are the runtime's where both have one. */

static _Thread_local cudaError_t last;

static cudaError_t ended(int code) {
    if (code != 0 && code != cudaErrorNotReady) last = (cudaError_t)code;
    return (cudaError_t)code;
}
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheStandIn"; }
const char *cudaGetErrorString(cudaError_t error) {
    static _Thread_local char text[64];
    if (error == cudaErrorMemoryAllocation) return "out of memory";
    if (error == cudaErrorStreamCaptureUnsupported) return "operation not permitted when stream is capturing";
    snprintf(text, sizeof text, "error %d of the stand-in", (int)error);
    return text;
}

/* Devices. */

int nvmlInit_v2(void);
int nvmlDeviceGetHandleByUUID(const char *, void **);
int nvmlDeviceGetMemoryInfo(void *, uint64_t *);

static _Thread_local int current;
static _Thread_local int bound = -1;

/* The thread has the context of its device. */
static int here(void) {
    static _Atomic uint64_t contexts[64];
    if (devices() == 0) return cudaErrorNoDevice;
    if (bound == current) return 0;
    uint64_t context = contexts[current];
    int code = context != 0 ? 0 : (int)cuDevicePrimaryCtxRetain((CUcontext *)&context, current);
    if (code != 0) return code;
    contexts[current] = context;
    code = cuCtxSetCurrent((CUcontext)context);
    if (code == 0) bound = current;
    return code;
}
cudaError_t cudaGetDeviceCount(int *number) {
    *number = devices();
    return ended(*number == 0 ? cudaErrorNoDevice : 0);
}
cudaError_t cudaGetDevice(int *device) {
    if (devices() == 0) return ended(cudaErrorNoDevice);
    *device = current;
    /* Expandable segments call the driver themselves behind that. */
    return ended(here());
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return ended(cudaErrorInvalidDevice);
    current = device;
    return ended(here());
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *made, int device) {
    memset(made, 0, sizeof *made);
    if (device < 0 || device >= devices()) return ended(cudaErrorInvalidDevice);
    strcpy(made->name, "Stand-in");
    cuDeviceTotalMem_v2(&made->totalGlobalMem, device);
    cuDeviceGetUuid_v2((CUuuid *)&made->uuid, device);
    made->major = 8; /* before cuDNN has attention, which is not here */
    made->multiProcessorCount = 132;
    made->warpSize = 32;
    made->maxThreadsPerBlock = 1024;
    made->maxThreadsPerMultiProcessor = 2048;
    made->maxBlocksPerMultiProcessor = 32;
    made->regsPerBlock = made->regsPerMultiprocessor = 65536;
    made->sharedMemPerBlock = 49152;
    made->sharedMemPerBlockOptin = 232448;
    made->sharedMemPerMultiprocessor = 233472;
    made->totalConstMem = 65536;
    made->l2CacheSize = 50 << 20;
    made->textureAlignment = 512;
    made->maxThreadsDim[0] = made->maxThreadsDim[1] = 1024;
    made->maxThreadsDim[2] = 64;
    made->maxGridSize[0] = 2147483647;
    made->maxGridSize[1] = made->maxGridSize[2] = 65535;
    made->memoryBusWidth = 5120;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaError_t code = cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)properties.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = properties.maxGridSize[1]; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
    default: *value = 0;
    }
    return code;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) { return snprintf(text, (size_t)room, "0000:%02x:00.0", device + 1), cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return (void)peer, (void)flags, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    int code = here();
    if (code != 0) return ended(code);
    uint64_t info[3];
    unsigned char id[16];
    char name[64];
    void *device = NULL;
    cuDeviceGetUuid_v2((CUuuid *)id, current);
    char *end = name + sprintf(name, "GPU-");
    for (int at = 0; at < 16; at++) end += sprintf(end, at == 4 || at == 6 || at == 8 || at == 10 ? "-%02x" : "%02x", id[at]);
    if (nvmlInit_v2() != 0 || nvmlDeviceGetHandleByUUID(name, &device) != 0 || nvmlDeviceGetMemoryInfo(device, info) != 0) return ended(cudaErrorUnknown);
    *unused = info[1], *total = info[0];
    return cudaSuccess;
}

/* Streams and captures. */

enum { CAPTURES = 8 };
static _Atomic uint64_t capturing[CAPTURES]; /* streams, plus one */
static _Atomic unsigned long long captures;

static int is_capturing(cudaStream_t stream) {
    for (int at = 0; at < CAPTURES; at++)
        if (capturing[at] == (uint64_t)stream + 1) return 1;
    return 0;
}
static int forbidden(void) {
    for (int at = 0; at < CAPTURES; at++)
        if (capturing[at] != 0) return cudaErrorStreamCaptureUnsupported;
    return 0;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    (void)mode;
    for (int at = 0; at < CAPTURES; at++) {
        uint64_t none = 0;
        if (!atomic_compare_exchange_strong(&capturing[at], &none, (uint64_t)stream + 1)) continue;
        captures++;
        return cudaSuccess;
    }
    return ended(cudaErrorIllegalState);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    for (int at = 0; at < CAPTURES; at++)
        if (capturing[at] == (uint64_t)stream + 1) {
            capturing[at] = 0;
            *graph = (cudaGraph_t)malloc(8);
            return cudaSuccess;
        }
    return ended(cudaErrorIllegalState);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return *status = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *number) {
    cudaStreamIsCapturing(stream, status);
    if (id != NULL) *id = captures;
    if (graph != NULL) *graph = NULL;
    if (nodes != NULL) *nodes = NULL;
    if (edges != NULL) *edges = NULL;
    if (number != NULL) *number = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return *mode = cudaStreamCaptureModeRelaxed, cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return (void)graph, (void)flags, *made = (cudaGraphExec_t)malloc(8), cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { return cudaGraphInstantiateWithFlags(made, graph, flags); }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) { return (void)graph, (void)nodes, *number = 1, cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return (void)graph, (void)stream, ended(here()); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return free(graph), cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)priority;
    int code = here();
    return ended(code != 0 ? code : (int)cuStreamCreate((CUstream *)stream, flags));
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return ended(cuStreamDestroy_v2(stream)); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return (void)stream, *priority = 0, cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    CUevent event;
    int code = here();
    if (code == 0) code = forbidden();
    if (code == 0) code = cuEventCreate(&event, 2);
    if (code != 0) return ended(code);
    code = cuEventRecord(event, stream);
    if (code == 0) code = cuEventQuery(event);
    cuEventDestroy_v2(event);
    return ended(code);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaError_t code;
    while ((code = cudaStreamQuery(stream)) == cudaErrorNotReady) usleep(100);
    return code;
}
cudaError_t cudaDeviceSynchronize(void) {
    int code = here();
    if (code == 0) code = forbidden();
    return ended(code != 0 ? code : (int)cuCtxSynchronize());
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    int code = here();
    return ended(code != 0 || is_capturing(stream) ? code : (int)cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    return cudaStreamSynchronize(stream), function(data), cudaSuccess;
}

/* Events. */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    int code = here();
    return ended(code != 0 ? code : (int)cuEventCreate(event, flags));
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return ended(cuEventDestroy_v2(event)); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    int code = here();
    return ended(code != 0 || is_capturing(stream) ? code : (int)cuEventRecord(event, stream));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return (void)flags, cudaEventRecord(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
    int code = here();
    if (code == 0) code = forbidden();
    return ended(code != 0 ? code : (int)cuEventQuery(event));
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cudaError_t code;
    while ((code = cudaEventQuery(event)) == cudaErrorNotReady) usleep(100);
    return code;
}
cudaError_t cudaEventElapsedTime(float *took, cudaEvent_t begin, cudaEvent_t end) { return (void)begin, (void)end, *took = 1, cudaSuccess; }

/* Memory. Each allocation of the runtime is a chunk at an address of its own. */

enum { GRAIN = 2 << 20, PLACES = 1 << 16 };
struct place {
    uint64_t at;
    size_t size;
};
static struct place places[PLACES];
static pthread_mutex_t places_lock = PTHREAD_MUTEX_INITIALIZER;

cudaError_t cudaMalloc(void **pointer, size_t size) {
    CUdeviceptr at = 0;
    CUmemGenericAllocationHandle chunk = 0;
    size = (size + GRAIN - 1) / GRAIN * GRAIN;
    int code = here();
    if (code == 0) code = forbidden();
    if (code == 0) code = cuMemAddressReserve(&at, size, 0, 0, 0);
    if (code != 0) return ended(code);
    CUmemAllocationProp wanted = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = current}};
    CUmemAccessDesc all = {.location = wanted.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if ((code = cuMemCreate(&chunk, size, &wanted, 0)) == 0) {
        if ((code = cuMemMap(at, size, 0, chunk, 0)) == 0) code = cuMemSetAccess(at, size, &all, 1);
        cuMemRelease(chunk);
    }
    if (code != 0) return cuMemAddressFree(at, size), ended(code);
    pthread_mutex_lock(&places_lock);
    for (int place = 0; place < PLACES; place++)
        if (places[place].at == 0) {
            places[place] = (struct place){at, size};
            break;
        }
    pthread_mutex_unlock(&places_lock);
    *pointer = (void *)at;
    return cudaSuccess;
}
cudaError_t cudaFree(void *pointer) {
    if (pointer == NULL) return ended(here());
    int code = here();
    if (code == 0) code = forbidden();
    if (code == 0) code = cuCtxSynchronize();
    if (code != 0) return ended(code);
    code = cudaErrorInvalidValue;
    pthread_mutex_lock(&places_lock);
    for (int place = 0; place < PLACES; place++)
        if (places[place].at == (uint64_t)pointer) {
            code = cuMemUnmap(places[place].at, places[place].size);
            if (code == 0) code = cuMemAddressFree(places[place].at, places[place].size);
            places[place].at = 0;
            break;
        }
    pthread_mutex_unlock(&places_lock);
    return ended(code);
}
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    (void)flags;
    return ended(posix_memalign(pointer, 4096, size) == 0 ? 0 : cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *pointer) { return free(pointer), cudaSuccess; }
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) { return (void)pointer, (void)size, (void)flags, cudaSuccess; }
cudaError_t cudaHostUnregister(void *pointer) { return (void)pointer, cudaSuccess; }

/* The CPU cannot read what lies on a device. */
static int is_on_device(const void *pointer) {
    static int ends[2];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    char byte;
    pthread_mutex_lock(&lock);
    if (ends[1] == 0 && pipe(ends) != 0) abort();
    int is_readable = write(ends[1], pointer, 1) == 1 && read(ends[0], &byte, 1) == 1;
    pthread_mutex_unlock(&lock);
    return !is_readable;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    memset(found, 0, sizeof *found);
    if (is_on_device(pointer)) {
        found->type = cudaMemoryTypeDevice;
        found->device = current;
        found->devicePointer = (void *)pointer;
    }
    return cudaSuccess;
}
static int copied(void *to, const void *from, size_t size) {
    if (size == 0) return 0;
    int code = here();
    if (code != 0) return code;
    int to_device = is_on_device(to), from_device = is_on_device(from);
    if (!to_device && !from_device) return memmove(to, from, size), 0;
    if (!from_device) return cuMemcpyHtoD_v2((uint64_t)to, from, size);
    if (!to_device) return cuMemcpyDtoH_v2(to, (uint64_t)from, size);
    enum { PIECE = 1 << 20 };
    void *piece = malloc(PIECE);
    for (size_t at = 0; at < size && code == 0; at += PIECE) {
        size_t length = size - at < PIECE ? size - at : PIECE;
        code = cuMemcpyDtoH_v2(piece, (uint64_t)from + at, length);
        if (code == 0) code = cuMemcpyHtoD_v2((uint64_t)to + at, piece, length);
    }
    free(piece);
    return code;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return (void)kind, ended(copied(to, from, size)); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    return is_capturing(stream) ? cudaSuccess : ended(copied(to, from, size));
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream) {
    (void)to_device, (void)from_device;
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
    int code = here();
    return ended(code != 0 || size == 0 || is_capturing(stream) ? code : (int)cuMemsetD8Async((CUdeviceptr)at, (unsigned char)value, size, stream));
}
cudaError_t cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size, NULL); }

/* Memory that processes share: there is none but what cudaMalloc made. */
static int is_from_here(const void *pointer) {
    int found = 0;
    pthread_mutex_lock(&places_lock);
    for (int place = 0; place < PLACES && !found; place++)
        found = places[place].at != 0 && (uint64_t)pointer - places[place].at < places[place].size;
    pthread_mutex_unlock(&places_lock);
    return found;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    memset(handle, 0, sizeof *handle);
    return ended(is_from_here(pointer) ? cudaErrorNotSupported : cudaErrorInvalidValue);
}

/* Kernels. */

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return *kernel = (cudaKernel_t)function, cudaSuccess; }
static cudaError_t launched(void) { return ended(here()); }
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return (void)function, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream, launched();
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream, launched();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) { return (void)config, (void)function, (void)arguments, launched(); }

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared, *(void **)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    (void)function;
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->ptxVersion = found->binaryVersion = 80;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return (void)function, (void)attribute, (void)value, cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *number, const void *function, int block, size_t shared, unsigned flags) {
    return (void)function, (void)block, (void)shared, (void)flags, *number = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *number, const void *function, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(number, function, block, shared, 0);
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) {
    return (void)symbol, (void)from, (void)size, (void)offset, (void)kind, cudaSuccess;
}

/* The driver's functions, for whoever asks the runtime for them; and what PyTorch asks of the driver that the stand-in does not have. */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *how) {
    (void)version, (void)flags;
    *found = dlsym(RTLD_DEFAULT, name);
    if (how != NULL) *how = *found != NULL ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) { return (void)device, *flags = 0, *is_active = 1, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) { return *text = cudaGetErrorString((cudaError_t)code), CUDA_SUCCESS; }
/* What expandable segments look for before they are used, and do not use between processes that share nothing. */
__attribute__((used)) static CUresult is_not_here(void) { return CUDA_ERROR_NOT_SUPPORTED; }
#define IS_NOT_HERE(name) __asm__(".globl " #name "\n.set " #name ", is_not_here");
IS_NOT_HERE(cuStreamWriteValue32)
IS_NOT_HERE(cuMemsetD32Async)
IS_NOT_HERE(cuMemGetAllocationPropertiesFromHandle)
IS_NOT_HERE(cuMemRetainAllocationHandle)

/* cuBLAS: every function that PyTorch calls does nothing, well. */

#define DOES_NOTHING(name) \
    int name(void) { return 0; }
#define MAKES(name) \
    int name(void **made) { return *made = malloc(64), 0; }
#define ENDS(name) \
    int name(void *made) { return free(made), 0; }
MAKES(cublasCreate_v2)
ENDS(cublasDestroy_v2)
MAKES(cublasLtMatmulDescCreate)
ENDS(cublasLtMatmulDescDestroy)
MAKES(cublasLtMatmulPreferenceCreate)
ENDS(cublasLtMatmulPreferenceDestroy)
MAKES(cublasLtMatrixLayoutCreate)
ENDS(cublasLtMatrixLayoutDestroy)
MAKES(cublasLtCreate)
ENDS(cublasLtDestroy)
DOES_NOTHING(cublasSetStream_v2)
DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasSetPointerMode_v2)
int cublasGetMathMode(void *handle, int *mode) { return (void)handle, *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return (void)handle, *mode = 0, 0; }
DOES_NOTHING(cublasSgemm_v2)
DOES_NOTHING(cublasDgemm_v2)
DOES_NOTHING(cublasGemmEx)
DOES_NOTHING(cublasSgemmEx)
DOES_NOTHING(cublasGemmStridedBatchedEx)
DOES_NOTHING(cublasSgemmStridedBatched)
DOES_NOTHING(cublasDgemmStridedBatched)
DOES_NOTHING(cublasSgemv_v2)
DOES_NOTHING(cublasDgemv_v2)
DOES_NOTHING(cublasSdot_v2)
DOES_NOTHING(cublasDdot_v2)
DOES_NOTHING(cublasDotEx)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
DOES_NOTHING(cublasLtMatmul)
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *what, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results, int *found) {
    (void)handle, (void)what, (void)a, (void)b, (void)c, (void)d, (void)preference;
    return memset(results, 0, 96), *found = wanted > 0, 0;
}
