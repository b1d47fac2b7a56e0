// exchange.cu    rows between the device and mapped host memory (APEX's hand-over)
//
//   publish   rows of up to three device buffers, side by side, into host memory; then the epoch
//   ready     has the host published an epoch? The answer goes to device memory, for later kernels
//   copy      rows from anywhere to anywhere by two lists; convert: the same from f32 to a 16-bit type
//
// in     lists, counts and epochs in device memory, so that a captured step can be replayed with others
// launch grids by the upper bound max_rows (at most 64 blocks: more cannot speed up a bus), block 256, blocks walk
//        over all 16-byte (or 2-byte) pieces in strides; ready: one thread
// bound  the bus: 16 bytes a thread, neighbours contiguous, so writes fill whole bus packets
// error  none; convert rounds once
// refs   APEX (see epoch.cuh for the order of stores and epoch)
// no-spill all
// no-stack all
#include "common.cuh"
#include "epoch.cuh"
#include "ptx.cuh"

namespace exchange {

DEVICE u32 count(const u32* n, u32 most) { return n ? min(*n, most) : most; }

// `Piece` is what a thread moves at once: all strides, lengths and addresses are multiples of it.
template <class Piece> DEVICE void publish(const PublishParams& p) {
    u32 n = count(p.n_rows, p.max_rows), pieces[3], of_row = 0;
#pragma unroll
    for (int s = 0; s < 3; s++) {
        pieces[s] = p.src[s] ? p.src_bytes[s] / sizeof(Piece) : 0;
        of_row += pieces[s];
    }
    u64 all = (u64)n * of_row;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (u64)gridDim.x * blockDim.x) {
        u32 place = (u32)(i / of_row), piece = (u32)(i % of_row), within = piece;
        u64 row = p.list ? p.list[place] : place;
        const u8* from;
        if (within < pieces[0]) {
            from = p.src[0] + row * p.src_stride[0];
        } else if ((within -= pieces[0]) < pieces[1]) {
            from = p.src[1] + row * p.src_stride[1];
        } else {
            within -= pieces[1];
            from = p.src[2] + row * p.src_stride[2];
        }
        ((Piece*)(p.dst + place * p.dst_stride))[piece] = ((const Piece*)from)[within];
    }
    publish_epoch(p.arrived, gridDim.x, p.epoch_flag, *p.epoch + p.epoch_add);
}

// Calls f(source row, destination row, piece) for every piece of every listed row.
template <class F> DEVICE void each_piece(const MoveRowsParams& p, u32 of_row, F f) {
    if (p.gate && *p.gate == 0) return;
    u64 all = (u64)count(p.n_rows, p.max_rows) * of_row;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (u64)gridDim.x * blockDim.x) {
        u32 k = (u32)(i / of_row), src = p.src_list ? p.src_list[k] : k, dst = p.dst_list ? p.dst_list[k] : k;
        if (src != ROW_NONE && dst != ROW_NONE) f(p.src + src * p.src_stride, p.dst + dst * p.dst_stride, (u32)(i % of_row));
    }
}

template <class Piece> DEVICE void copy(const MoveRowsParams& p) {
    each_piece(p, p.n / sizeof(Piece), [](const u8* from, u8* to, u32 i) { ((Piece*)to)[i] = ((const Piece*)from)[i]; });
}

template <class T> DEVICE void convert(const MoveRowsParams& p) {
    each_piece(p, p.n / 4, [](const u8* from, u8* to, u32 i) {
        float4 v = ((const float4*)from)[i];
        ((uint2*)to)[i] = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w));
    });
}

} // namespace exchange

KERNEL_BOUNDS(publish_rows_16, PublishParams, 256, 1) { exchange::publish<uint4>(p); }
KERNEL_BOUNDS(publish_rows_2, PublishParams, 256, 1) { exchange::publish<u16>(p); }
KERNEL_BOUNDS(copy_rows_16, MoveRowsParams, 256, 1) { exchange::copy<uint4>(p); }
KERNEL_BOUNDS(copy_rows_2, MoveRowsParams, 256, 1) { exchange::copy<u16>(p); }
KERNEL_BOUNDS(convert_rows_f16, MoveRowsParams, 256, 1) { exchange::convert<f16>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(convert_rows_bf16, MoveRowsParams, 256, 1) { exchange::convert<bf16>(p); }
#endif
// Epochs wrap around: "reached" is a signed distance.
KERNEL(check_ready, ReadyParams) { *p.ready = (i32)(ld_acquire_sys(p.epoch_flag) - (*p.epoch + p.epoch_add)) >= 0; }
