// exchange.cu    rows between the device and mapped host memory (APEX's hand-over)
//
//   publish   rows of up to three device buffers, side by side, into host memory, as they are or rounded from f32 to a 16-bit
//             type; then the epoch
//   ready     has the host published an epoch? The answer goes to device memory, for later kernels
//   copy      rows from anywhere to anywhere by two lists
//
// in     lists, counts and epochs in device memory, so that a captured step can be replayed with others
// launch grids by the upper bound max_rows (at most 64 blocks: more cannot speed up a bus), block 256, blocks walk
//        over all pieces of 16 bytes (or 2) as the host gets them in strides; ready: one thread
// bound  the bus: 16 bytes a thread, neighbours contiguous, so writes fill whole bus packets
// error  none; publish from f32 rounds once, to nearest even
// refs   APEX (see epoch.cuh for the order of stores and epoch)
// no-spill all
// no-stack all
#include "common.cuh"
#include "epoch.cuh"
#include "ptx.cuh"

namespace exchange {

DEVICE u32 count(const u32* n, u32 most) { return n ? min(*n, most) : most; }

// What a thread moves at once, FROM bytes to one `To`: strides, lengths and addresses are multiples of these.
template <class Piece> struct AsItIs {
    using To = Piece;
    static constexpr u32 FROM = sizeof(Piece);
    static DEVICE Piece of(const u8* from) { return *(const Piece*)from; }
};
// Eight floats, rounded.
template <class T> struct Rounded {
    using To = uint4;
    static constexpr u32 FROM = 32;
    static DEVICE uint4 of(const u8* from) {
        float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
        return make_uint4(pack2<T>(a.x, a.y), pack2<T>(a.z, a.w), pack2<T>(b.x, b.y), pack2<T>(b.z, b.w));
    }
};

template <class Move> DEVICE void publish(const PublishParams& p) {
    u32 n = count(p.n_rows, p.max_rows), pieces[3], of_row = 0;
#pragma unroll
    for (int s = 0; s < 3; s++) {
        pieces[s] = p.src[s] ? p.src_bytes[s] / Move::FROM : 0;
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
        ((typename Move::To*)(p.dst + place * p.dst_stride))[piece] = Move::of(from + (u64)within * Move::FROM);
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

} // namespace exchange

KERNEL_BOUNDS(publish_rows_16, PublishParams, 256, 1) { exchange::publish<exchange::AsItIs<uint4>>(p); }
KERNEL_BOUNDS(publish_rows_2, PublishParams, 256, 1) { exchange::publish<exchange::AsItIs<u16>>(p); }
KERNEL_BOUNDS(publish_rows_f16, PublishParams, 256, 1) { exchange::publish<exchange::Rounded<f16>>(p); }
#if TANDEM_SM >= 80
KERNEL_BOUNDS(publish_rows_bf16, PublishParams, 256, 1) { exchange::publish<exchange::Rounded<bf16>>(p); }
#endif
KERNEL_BOUNDS(copy_rows_16, MoveRowsParams, 256, 1) { exchange::copy<uint4>(p); }
KERNEL_BOUNDS(copy_rows_2, MoveRowsParams, 256, 1) { exchange::copy<u16>(p); }
// Epochs wrap around: "reached" is a signed distance.
KERNEL(check_ready, ReadyParams) { *p.ready = (i32)(ld_acquire_sys(p.epoch_flag) - (*p.epoch + p.epoch_add)) >= 0; }
