// exchange.cu    rows between the device and mapped host memory (APEX's hand-over)
//
//   publish   rows of f32 of up to three device buffers, side by side, rounded to a 16-bit type, into host memory; then the
//             epoch
//   ready     has the host published an epoch? The answer goes to device memory, for later kernels
//   copy      rows from anywhere to anywhere by two lists
//
// in     lists, counts and epochs in device memory, so that a captured step can be replayed with others
// launch grids by the upper bound max_rows (at most 64 blocks: more cannot speed up a bus), block 256, blocks walk
//        over all pieces of 16 bytes (copy: or 2) that they write in strides; ready: one thread
// bound  the bus: 16 bytes a thread, neighbours contiguous, so writes fill whole bus packets
// error  none; publish rounds once, to nearest even
// refs   APEX (see epoch.cuh for the order of stores and epoch)
// no-spill all
// no-stack all
#include "common.cuh"
#include "epoch.cuh"
#include "ptx.cuh"

namespace exchange {

DEVICE u32 count(const u32* n, u32 most) { return n ? min(*n, most) : most; }

// A thread takes eight floats at once: lengths of rows are multiples of them, strides and addresses of 16 bytes.
template <class T> DEVICE void publish(const PublishParams& p) {
    constexpr u32 PIECE = 8 * sizeof(float);
    u32 n = count(p.n_rows, p.max_rows), pieces[3], of_row = 0;
#pragma unroll
    for (int s = 0; s < 3; s++) {
        pieces[s] = p.src[s] ? p.src_bytes[s] / PIECE : 0;
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
        const float4* values = (const float4*)(from + (u64)within * PIECE);
        float4 a = values[0], b = values[1];
        ((uint4*)(p.dst + place * p.dst_stride))[piece] =
            make_uint4(pack2<T>(a.x, a.y), pack2<T>(a.z, a.w), pack2<T>(b.x, b.y), pack2<T>(b.z, b.w));
    }
    publish_epoch(p.arrived, gridDim.x, p.epoch_flag, *p.epoch + p.epoch_add);
}

// `Piece` is what a thread moves at once: all strides, lengths and addresses are multiples of it.
template <class Piece> DEVICE void copy(const MoveRowsParams& p) {
    if (p.gate && *p.gate == 0) return;
    u32 of_row = p.n / sizeof(Piece);
    u64 all = (u64)count(p.n_rows, p.max_rows) * of_row;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (u64)gridDim.x * blockDim.x) {
        u32 k = (u32)(i / of_row), src = p.src_list ? p.src_list[k] : k, dst = p.dst_list ? p.dst_list[k] : k;
        if (src == ROW_NONE || dst == ROW_NONE) continue;
        ((Piece*)(p.dst + dst * p.dst_stride))[i % of_row] = ((const Piece*)(p.src + src * p.src_stride))[i % of_row];
    }
}

} // namespace exchange

KERNEL_BOUNDS(publish_rows_f16, PublishParams, 256, 1) { exchange::publish<f16>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(publish_rows_bf16, PublishParams, 256, 1) { exchange::publish<bf16>(p); }
#endif
KERNEL_BOUNDS(copy_rows_16, MoveRowsParams, 256, 1) { exchange::copy<uint4>(p); }
KERNEL_BOUNDS(copy_rows_2, MoveRowsParams, 256, 1) { exchange::copy<u16>(p); }
// Epochs wrap around: "reached" is a signed distance.
KERNEL(check_ready, ReadyParams) { *p.ready = (i32)(ld_acquire_sys(p.epoch_flag) - (*p.epoch + p.epoch_add)) >= 0; }
