// abi.h    parameter structs that cross from the host to kernels: plain C, no includes, no pointers to host memory
//
// Read by nvcc, by g++ (host emulation) and by bindgen (which makes `tandem::device::kernels::abi` of it). One
// header an operation below abi/. Every struct whose name ends in Params is the one parameter of some kernels.
#pragma once

#ifdef TANDEM_BINDGEN
typedef struct { unsigned long long addr; } DevPtr;    // replaced by tandem's own DevPtr
#define PTR(T) DevPtr
#else
#define PTR(T) T*
#endif

typedef unsigned char abi_u8;
typedef unsigned short abi_u16;
typedef unsigned int abi_u32;
typedef unsigned long long abi_u64;

// A tensor map (Runtime::tensor_map_2d). Kernels take its address inside a __grid_constant__ parameter. The driver wants
// 64-byte alignment; 128, its size, keeps it in one line of the cache that descriptors are fetched through.
typedef struct __attribute__((aligned(128))) { abi_u8 bytes[128]; } TensorMap;

// What a page of the KV cache holds: tokens per page, for every kernel and the host (tandem::cache::PAGE_TOKENS).
#define KV_PAGE_TOKENS 32

#include "abi/elementwise.h"
#include "abi/exchange.h"
#include "abi/attention.h"
#include "abi/linear.h"
#include "abi/quant.h"
#include "abi/experts.h"
#include "abi/gemm.h"
#include "abi/peak.h"
#include "abi/conformance.h"
