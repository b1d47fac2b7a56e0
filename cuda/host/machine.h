// machine.h    what the emulator knows of the block it runs
//
// A launch takes a Machine, which runs the blocks one after another on the calling OS thread; every CUDA thread is
// a fiber of it. Two thread-local pointers say where we are: `machine` during a launch, `self` while a fiber runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../include/ptx.cuh"
#include "api.h"
#include "clocks.h"
#include "memory.h"

namespace emu {

constexpr u32 MAX_THREADS = 1024;
constexpr u32 MAX_WARPS = MAX_THREADS / 32;
constexpr u32 MAX_SHARED = 227 * 1024;
constexpr size_t STACK_BYTES = 64 * 1024;
// Where shared memory begins in its own 32-bit window: not 0, since the system reserves the first KiB on devices.
constexpr u32 SHARED_WINDOW = 1024;

// What a byte of shared memory holds. Bit 0: it may be read. Ordinary stores and cp.async write for ordinary
// loads (STORED); the asynchronous units see that only after a fence, what bulk copies wrote (WRITTEN) at once.
enum ByteState : u8 { UNWRITTEN = 0, WRITTEN = 1, IN_FLIGHT = 2, STORED = 3 };


// One cp.async that has been issued.
struct Copy {
    u8* to;
    const u8* from;
    bool predicate;
    bool landed;
    u32 group;
};

using Stats = struct tandem_emu_stats;

// Registers that a thread gave to wgmma_fence, with what they held: from there to the wait nobody else may use them.
struct FencedRegisters {
    const u32* at;
    std::vector<u32> words;
};

struct Thread {
    void* stack_pointer;
    u8* stack_low;
    dim3 index;
    u32 rank, lane, warp;
    bool ended;
    const char* what; // the instruction it waits in, when it is not ready
    Site site;
    std::vector<Copy> copies; // oldest first
    u32 groups;               // committed so far
    u32 fenced;               // epoch below which its stores are visible to the asynchronous units
    FencedRegisters ordered[2]; // by its latest wgmma_fence
};

// Lanes of a warp that have arrived at one instruction which they execute together.
struct Meeting {
    u32 mask, arrived;
    const char* what;
    Site site;
};

// Operands and results of a warp-wide instruction: each lane has its own slot, so that a lane which is late to
// read its result loses nothing to lanes that are already at the next instruction.
union Slot {
    struct {
        u32 value;
        i32 operand;
        i32 width;
        u32 result;
    } shuffle;
    struct {
        const u8* row;
        u32 r[4];
    } matrix;
    struct {
        u32 a[4], b[2];
        float c[4];
    } mma;
    struct {
        u32 a[4], b[2];
        i32 c[4];
    } mma_s8;
    struct {
        float* d;
        u64 a, b;
        const u32* a_registers;
        bool accumulate;
    } wgmma;
};

struct Warp {
    u32 lanes;     // that exist
    u32 runnable;  // lanes
    u32 completed; // lanes that met in the instruction being executed
    Meeting meetings[4];
    u32 meetings_open;
    Slot slots[32];
};

struct Barrier {
    u32 arrived, expected; // threads; 0 arrived: not in use
    Site site;
    u32 waiting_warps;
    u32 waiting[MAX_WARPS]; // lanes
    bool any_released;
    Clock released; // by threads that arrived without waiting
};

// An mbarrier's waiting threads and clocks; its counts are in shared memory, as on the device.
struct MBarrier {
    const u64* at;
    u32 waiting[MAX_WARPS]; // lanes
    Clock arriving, completed;
};

// A matrix in device memory and the box that is copied of it: what a tensor map holds here.
struct Tensor {
    u64 magic;
    const u8* base;
    u64 rows, cols, stride; // in elements of 2 bytes
    u32 box_rows, box_cols;
};
struct BulkCopy {
    u8* to;
    Tensor tensor;
    u64* bar;
    i32 x, y;
};

// A wgmma of a warp (its 16 of the 64 rows) that has been issued.
struct Product {
    u64 a, b;
    u32 n;
    bool is_bf16, accumulate, done;
    u32 group;
    u32 accumulators;
    Site site;
    // a is not a descriptor but four words of each lane, and b is by N.
    bool a_in_registers;
    const u32* a_at[32];
    u32 a_words[32][4];
};
// Accumulators that are not the kernel's to read: [16][n], and where the lanes want them.
struct Accumulators {
    float* d[32];
    u32 n, pending;
    std::vector<float> values;
};
struct ProductQueue {
    std::vector<Product> products;
    std::vector<Accumulators> accumulators;
    u32 groups;   // committed
    size_t issued; // in this block
};

struct Machine {
    // The launch.
    const KernelEntry* kernel;
    const void* params;
    size_t params_size;
    dim3 grid, block_size;
    tandem_emu_config config;
    std::shared_ptr<const Regions> regions;

    // The block.
    dim3 block;
    u32 block_number; // in the order in which they run, from 1
    u32 thread_count, warp_count, alive;
    u8* shared;
    u32 shared_bytes;
    void* scheduler_stack_pointer;
    Warp warps[MAX_WARPS];
    u32 ready_warps; // those with runnable lanes
    Barrier barriers[16];
    Thread threads[MAX_THREADS];

    // The checker.
    std::vector<u8> byte_state;   // of shared memory
    std::vector<Cell> cells;      // of shared memory, one every 4 bytes
    std::vector<ByteCells> split; // of words that are accessed in parts
    Clocks clocks;
    GlobalCells global_cells;
    bool acquired;           // this block has synchronised with others (atomic, fence, acquire)
    RegionCache region_cache;
    u64 random;
    u32 until_preemption;
    u64 spins;

    // sm_90a.
    std::vector<MBarrier> mbarriers;
    std::vector<BulkCopy> bulk_copies; // in flight, oldest first
    ProductQueue products[MAX_WARPS];
    std::vector<Product> warpgroup_products[MAX_WARPS / 4]; // as its first warp issued them

    bool failed;
    std::string error;
    const void* error_code; // where in the program; nullptr when the error names its call site
    Stats stats;

    std::vector<u8> shared_storage;
    u8* stacks;          // of all fibers, mapped once
    size_t stacks_ready; // fibers whose stack is accessible

    Machine();
    ~Machine();
};

// (initial-exec: found without a call, even when this is linked into a shared library.)
#define EMU_THREAD_LOCAL __attribute__((tls_model("initial-exec"))) __thread
extern EMU_THREAD_LOCAL Machine* machine;
extern EMU_THREAD_LOCAL Thread* self;
// Whether loads and stores of kernels are looked at: a word of its own, since the hooks ask for each of them.
extern EMU_THREAD_LOCAL bool watching;

inline u64 random_number() {
    u64 x = machine->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return machine->random = x;
}
inline bool checks(u32 bit) { return machine->config.checks & bit; }
// A new name for what device memory is marked with; names repeat after 2^18, when old marks must be gone.
inline void rename_launch(GlobalCells& cells) {
    if (++cells.launch % (1u << 18) == 0) cells.table.clear();
}
inline bool random_schedule() { return machine->config.schedule >= TANDEM_EMU_RANDOM; }

// fiber.cpp
void prepare_stack(u32 thread);
void switch_stack(void** save, void* load);

// schedule.cpp
void run_threads();                                   // from the launching thread: until none can run
void yield_until_woken(const char* what, Site site);  // the running fiber waits
void yield();                                         // lets others run, stays ready
void wake(u32 warp, u32 lanes);
[[noreturn]] void end_thread();

// report.cpp. A place is a call site or, from the compiler's hooks, a return address.
struct Place {
    Site site;
    const void* code;
    Place(Site site) : site(site), code(nullptr) {}
    Place(const void* code) : site{nullptr, 0}, code(code) {}
};
// Records the first error of a launch, as a deed of `thread` (or of the block), and stops the block: from a fiber
// it does not return.
void record(const Thread* thread, const Place& place, const std::string& what);
[[noreturn]] void fail(const Place& place, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(dim3 d);
std::string text(Site site);
// The error's place in the source, looked up from the launching thread's own stack.
void resolve_error();

// access.cpp: one access of the running thread, anywhere.
enum class Access { READ, WRITE, ATOMIC, READ_ONLY, COPY }; // COPY: reads, but not whether somebody wrote it
void check(const void* at, size_t bytes, Access access, const Place& place);

// shared.cpp: shared memory: what its bytes hold and who used them last.
inline bool in_shared(const void* at) { return (size_t)((const u8*)at - machine->shared) < machine->shared_bytes; }
// That [at, at + bytes) lies in shared memory, aligned.
void require_shared(const void* at, size_t bytes, size_t align, const char* what, const Place& place);
void check_shared(size_t offset, size_t bytes, Access access, u32 stamp, const Place& place);
void set_state(const void* at, size_t bytes, ByteState state);
void stamp_write(const void* at, size_t bytes, u32 stamp);
// That an asynchronous unit may read the bytes: what threads stored there, they have fenced.
void require_fenced(size_t offset, size_t bytes, const Place& place);
void begin_block_checks();
// Stamps have few bits for epochs. When they are used up, the clocks begin again: everything so far counts as ordered
// before everything from now on (a race across that moment is missed; one in half a million barriers).
void restart_clocks();
inline void restart_clocks_if_late() {
    if (machine->clocks.epoch[self->warp] > EPOCH_LIMIT) restart_clocks();
}
u32 stamp_of(const Thread& thread);

// global.cpp: device memory.
void check_global(const void* at, size_t bytes, Access access, const Place& place);
void require_global(const void* at, size_t bytes, const char* what, const Place& place); // that it could be read
bool global_written(const void* at, size_t bytes); // always, where that is not checked

// copy.cpp, wgmma.cpp: what a thread must not leave behind
void require_copies_landed();
void require_products_finished();

// tma.cpp, mbarrier.cpp
bool land_bulk_copy();         // one that is in flight; false if there is none
void maybe_land_bulk_copies(); // at random, if the launch wants that
void bytes_arrived(u64* bar, u32 bytes);
void forget_mbarrier_clocks();

// warp.cpp
bool meet(u32 mask, const char* what, Site site); // true: this lane is the last and executes for all
void part();                                     // after executing: the others may go on

} // namespace emu
