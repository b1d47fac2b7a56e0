// gemm_sm90a.cu    gemm.cu for Hopper: operands by bulk tensor copies (TMA), products by warpgroup mma (wgmma)
// in     w [n][k] and x [m][ldx], f16 or bf16, as tensor maps with a 128-byte swizzle; k % 8 == 0, any m, n
// out    linear_epilogue.cuh: f32, or T through ReLU or a gated activation
// tile   128 rows of w x 256 or 128 tokens, 64 of k at a time: each of two consumer warpgroups 64 rows x all tokens
// launch grid of any size (one block a multiprocessor), each block takes every gridDim-th work item (tile, split);
//        block 384 = one producer warpgroup, two consumers
// shared a ring of 4 (6) stages of 48 (32) KiB, barriers after it: 193 KiB
// regs   128 (64) sums a thread; the producer gives its registers up
// no-spill all
// hgmma-run 4 all
// hgmma-open 1 all
// narrow-loads 0 all
// no-stack all
// entry-registers 168 all: 384 threads; 40 for the producer and 232 for both consumers are as many
// bound  matrix units: m64n256k16 reads 10 KiB of shared memory in the 128 cycles it takes (16 KiB could be read)
// error  as gemm.cu
// refs   CUTLASS sm90 warp-specialised persistent kernels; PTX ISA, asynchronous warpgroup instructions
//
//   producer    wait empty[s] -> expect bytes, copy w and x into stage s --.
//                  ^                                                      v full[s]
//   consumers   empty[s] <- wait until the wgmmas of the step before are done <- four wgmmas on stage s
#include "gemm_tiles.cuh"
#include "ptx.cuh"

#if TANDEM_SM90A

constexpr u32 ROWS = 128, DEPTH = 64, ROW_BYTES = DEPTH * 2;
constexpr u32 WARPGROUP = 128, CONSUMERS = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr u32 CONSUMER_BARRIER = 1;

// The ring and its barriers. A phase of full[s] is one arrival and the bytes it announced; one of empty[s] is an
// arrival of every consumer warp.
template <u32 TOKENS, u32 STAGES> struct Ring {
    static constexpr u32 W_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
    u8* stages;
    u64 *full, *empty;
    u32* flag;    // of split_k_reduce

    DEVICE Ring(u8* smem) : stages(smem), full((u64*)(smem + STAGES * STAGE_BYTES)), empty(full + STAGES), flag((u32*)(empty + STAGES)) {}
    DEVICE u8* w(u32 s) const { return stages + s * STAGE_BYTES; }
    DEVICE u8* x(u32 s) const { return stages + s * STAGE_BYTES + W_BYTES; }
};

// A place in the ring that goes round: the stage, and the parity of the phase it is in.
template <u32 STAGES> struct Cursor {
    u32 stage = 0, parity = 0;
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// One work item: a tile and its part of k. All warps go through the items in the same order.
struct Item {
    u32 tile, part, n0, m0, k_begin, steps;

    template <u32 TOKENS> static DEVICE Item of(const GemmTmaParams& p, u32 index, u32 row_tiles, u32 token_tiles) {
        Item it;
        it.part = index % p.split.splits;
        it.tile = index / p.split.splits;
        TilePlace place = tile_place(it.tile, row_tiles, token_tiles);
        it.n0 = place.row_tile * ROWS;
        it.m0 = place.token_tile * TOKENS;
        it.k_begin = it.part * p.split.k_per_split;
        it.steps = ceil_div(min(p.split.k_per_split, p.k - it.k_begin), DEPTH);
        return it;
    }
};

template <typename T, u32 TOKENS, u32 STAGES> DEVICE void gemm(const GemmTmaParams& p, u8* smem) {
    using Ring = Ring<TOKENS, STAGES>;
    Ring ring(smem);
    u32 warpgroup = threadIdx.x / WARPGROUP;
    u32 row_tiles = ceil_div(p.out.n, ROWS), token_tiles = ceil_div(p.out.m, TOKENS);
    u32 items = row_tiles * token_tiles * p.split.splits;

    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; s++) {
            mbar_init(ring.full + s, 1);
            mbar_init(ring.empty + s, CONSUMERS * WARPGROUP / 32);
        }
        mbar_init_fence();
    }
    __syncthreads();

    if (warpgroup == 0) {
        set_max_registers_dec<40>();
        if (threadIdx.x == 0) {
            Cursor<STAGES> at;
            for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
                Item it = Item::of<TOKENS>(p, index, row_tiles, token_tiles);
                for (u32 step = 0; step < it.steps; step++, at.advance()) {
                    mbar_wait(ring.empty + at.stage, at.parity ^ 1);    // the first round finds the stages empty
                    mbar_expect_tx(ring.full + at.stage, Ring::STAGE_BYTES);    // zeros outside the matrix count too
                    i32 k = it.k_begin + step * DEPTH;
                    tma_load_2d(ring.w(at.stage), &p.w, ring.full + at.stage, k, it.n0);
                    tma_load_2d(ring.x(at.stage), &p.x, ring.full + at.stage, k, it.m0);
                }
            }
        }
    } else {
        set_max_registers_inc<232>();
        u32 consumer = warpgroup - 1, thread = threadIdx.x - WARPGROUP, warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
        Cursor<STAGES> at;
        for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
            Item it = Item::of<TOKENS>(p, index, row_tiles, token_tiles);
            float sums[TOKENS / 2];
            wgmma_discard(sums);

            u64* read = nullptr;    // empty barrier of the stage that the wgmmas in flight read
            for (u32 step = 0; step < it.steps; step++, at.advance()) {
                mbar_wait(ring.full + at.stage, at.parity);
                u64 a = smem_desc_sw128(smem_u32(ring.w(at.stage) + consumer * 64 * ROW_BYTES));
                u64 b = smem_desc_sw128(smem_u32(ring.x(at.stage)));
                wgmma_fence(sums);
#pragma unroll
                for (u32 kk = 0; kk < DEPTH / 16; kk++) wgmma_m64k16<T, TOKENS>(sums, a + kk * 2, b + kk * 2, kk > 0 || step > 0);
                wgmma_commit();
                wgmma_wait<1>(sums);    // those of the step before are done: its stage may be overwritten
                if (read && lane == 0) mbar_arrive(read);
                read = ring.empty + at.stage;
            }
            wgmma_wait<0>(sums);
            if (lane == 0) mbar_arrive(read);

            if (p.split.splits > 1) {
                bool last = split_k_reduce<CONSUMERS * WARPGROUP, TOKENS / 8>(p.split, it.tile, it.part, thread, sums, ring.flag, [] {
                    named_barrier_sync(CONSUMER_BARRIER, CONSUMERS * WARPGROUP);
                });
                if (!last) continue;
            }
            u32 n = it.n0 + consumer * 64 + warp * 16 + lane / 4, m = it.m0 + lane % 4 * 2;
            store_sums<T, TOKENS / 8>(p.out, m, n, sums);
        }
    }
}

#define GEMM(name, T, TOKENS, STAGES) \
    KERNEL_BOUNDS(name, GemmTmaParams, THREADS, 1) { SHARED_DYNAMIC(smem); gemm<T, TOKENS, STAGES>(p, smem); }

GEMM(gemm_f16_128x256_sm90a, f16, 256, 4)
GEMM(gemm_f16_128x128_sm90a, f16, 128, 6)
GEMM(gemm_bf16_128x256_sm90a, bf16, 256, 4)
GEMM(gemm_bf16_128x128_sm90a, bf16, 128, 6)

#endif
