/* What the runtime's headers take from the compiler's, which PyTorch's packages do not bring. */
#ifndef STANDIN_HOST_DEFINES_H
#define STANDIN_HOST_DEFINES_H
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__
#define __noinline__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __builtin_align__(a) __attribute__((aligned(a)))
#define __align__(a) __attribute__((aligned(a)))
#define __location__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDACC_BUILD
#define _CUDA_DEPRECATED(...)
#endif
