// launch.cpp    kernels by name, launches, blocks one after another
#include "machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace emu {

// ---------------------------------------------------------------------------------------------------------
// Kernels.

static std::map<std::string, const KernelEntry*>& kernels() {
    static std::map<std::string, const KernelEntry*> kernels;
    return kernels;
}

KernelEntry::KernelEntry(const char* name, size_t params_size, u32 max_threads, void (*run)(const void*))
    : name(name), params_size(params_size), max_threads(max_threads), run(run) {
    if (!kernels().emplace(name, this).second) {
        fprintf(stderr, "two kernels are named %s\n", name);
        abort();
    }
}

static const KernelEntry* find_kernel(const char* name) {
    auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : found->second;
}

// ---------------------------------------------------------------------------------------------------------
// What a kernel asks about itself.

dim3 thread_index() { return self->index; }
dim3 block_index() { return machine->block; }
dim3 block_size() { return machine->block_size; }
dim3 grid_size() { return machine->grid; }
u8* shared_memory() { return machine->shared; }

// ---------------------------------------------------------------------------------------------------------
// Per calling thread: configuration, counters, the last error.

static thread_local tandem_emu_config config = {TANDEM_EMU_ASCENDING, TANDEM_EMU_COPIES_AT_WAIT, TANDEM_EMU_ALL, 0, 0};
static thread_local Stats totals;
static thread_local std::string last_error;

struct Global {
    std::mutex mutex;
    std::vector<std::unique_ptr<Machine>> idle; // machines keep their stacks and tables from launch to launch
    std::map<std::string, Stats> of_kernel;
};
static Global& global() {
    static Global* global = new Global; // launches may outlive static destructors
    return *global;
}

static void add(Stats& to, const Stats& from) {
    to.launches += from.launches, to.blocks += from.blocks, to.mma += from.mma;
    to.ldmatrix_phases += from.ldmatrix_phases, to.ldmatrix_conflicts += from.ldmatrix_conflicts;
    to.switches += from.switches, to.barriers += from.barriers, to.async_copies += from.async_copies;
}

static int refuse(int code, const std::string& why) {
    last_error = why;
    return code;
}

// ---------------------------------------------------------------------------------------------------------

static void set_up_threads(Machine& m) {
    dim3 size = m.block_size;
    m.thread_count = size.x * size.y * size.z;
    m.warp_count = (m.thread_count + 31) / 32;
    for (u32 rank = 0; rank < m.thread_count; rank++) {
        Thread& t = m.threads[rank];
        t.index = {rank % size.x, rank / size.x % size.y, rank / size.x / size.y};
        t.rank = rank, t.lane = rank % 32, t.warp = rank / 32;
    }
    for (u32 w = 0; w < MAX_WARPS; w++) {
        u32 threads = w < m.warp_count ? std::min(32u, m.thread_count - 32 * w) : 0;
        m.warps[w].lanes = threads == 32 ? ~0u : (1u << threads) - 1;
    }
}

static void set_up_shared(Machine& m, u32 bytes) {
    // Rounded up for the checker's words; 1024 to align by, as swizzles need.
    m.shared_bytes = bytes;
    if (m.shared_storage.size() < bytes + 2048u) m.shared_storage.resize(bytes + 2048u);
    m.shared = reinterpret_cast<u8*>(((size_t)m.shared_storage.data() + 1023) & ~(size_t)1023);
    if (!m.config.checks) return;
    if (m.byte_state.size() < bytes + 16u) m.byte_state.resize(bytes + 16u);
    if (m.cells.size() < bytes / 4 + 4u) m.cells.resize(bytes / 4 + 4u);
}

static void run_block(Machine& m, dim3 block) {
    m.block = block;
    m.block_number++;
    m.alive = m.thread_count;
    m.acquired = false;
    m.spins = 0;
    begin_block_checks();
    m.mbarriers.clear();
    m.bulk_copies.clear();
    for (ProductQueue& queue : m.products) {
        queue.products.clear(), queue.accumulators.clear();
        queue.groups = 0, queue.issued = 0;
    }
    for (auto& issued : m.warpgroup_products) issued.clear();
    m.ready_warps = 0;
    for (u32 w = 0; w < m.warp_count; w++) {
        m.warps[w].meetings_open = 0;
        m.warps[w].runnable = 0;
        wake(w, m.warps[w].lanes);
    }
    for (Barrier& b : m.barriers) {
        b.arrived = b.waiting_warps = 0;
        b.any_released = false;
        memset(b.waiting, 0, sizeof b.waiting);
    }
    for (u32 t = 0; t < m.thread_count; t++) {
        m.threads[t].ended = false;
        m.threads[t].what = "nothing";
        m.threads[t].site = {m.kernel->name, 0};
        m.threads[t].copies.clear();
        m.threads[t].groups = 0;
        for (FencedRegisters& r : m.threads[t].ordered) r.at = nullptr;
        prepare_stack(t);
    }
    run_threads();
    m.stats.blocks++;
}

static void run_grid(Machine& m) {
    u64 blocks = (u64)m.grid.x * m.grid.y * m.grid.z;
    std::vector<u32> order;
    if (random_schedule() && blocks <= 1u << 24) {
        order.resize(blocks);
        for (u32 i = 0; i < blocks; i++) order[i] = i;
        for (u32 i = (u32)blocks; i > 1; i--) std::swap(order[i - 1], order[random_number() % i]);
    }
    for (u64 i = 0; i < blocks && !m.failed; i++) {
        u64 number = !order.empty() ? order[i] : m.config.schedule == TANDEM_EMU_DESCENDING ? blocks - 1 - i : i;
        run_block(m, {(u32)(number % m.grid.x), (u32)(number / m.grid.x % m.grid.y), (u32)(number / m.grid.x / m.grid.y)});
    }
}

static std::unique_ptr<Machine> take_machine() {
    std::lock_guard<std::mutex> guard(global().mutex);
    if (global().idle.empty()) return std::make_unique<Machine>();
    auto m = std::move(global().idle.back());
    global().idle.pop_back();
    return m;
}

static void give_machine_back(std::unique_ptr<Machine> m) {
    m->regions.reset();
    add(totals, m->stats);
    std::lock_guard<std::mutex> guard(global().mutex);
    add(global().of_kernel[m->kernel->name], m->stats);
    global().idle.push_back(std::move(m));
}

static int launch(const KernelEntry& kernel, dim3 grid, dim3 block, u32 shared_bytes, const void* params) {
    std::unique_ptr<Machine> owned = take_machine();
    Machine& m = *owned;
    m.kernel = &kernel;
    m.grid = grid, m.block_size = block;
    m.config = config;
    m.regions = live_regions();
    m.region_cache = {};
    m.random = (config.seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    m.until_preemption = 1 + (u32)(config.seed % 64);
    m.block_number = 0;
    rename_launch(m.global_cells);
    m.failed = false;
    m.error.clear();
    m.error_code = nullptr;
    m.stats = {};
    m.stats.launches = 1;
    // Where constant parameters live: aligned for the tensor maps among them, and not the caller's.
    std::unique_ptr<void, void (*)(void*)> copy(aligned_alloc(128, (kernel.params_size + 127) & ~(size_t)127), free);
    memcpy(copy.get(), params, kernel.params_size);
    m.params = copy.get(), m.params_size = kernel.params_size;

    Machine* outer = machine;
    machine = &m;
    set_up_threads(m);
    set_up_shared(m, shared_bytes);
    run_grid(m);
    resolve_error();
    machine = outer;

    bool failed = m.failed;
    if (failed) last_error = m.error;
    give_machine_back(std::move(owned));
    return failed ? TANDEM_EMU_FAULT : TANDEM_EMU_OK;
}

} // namespace emu

using namespace emu;

extern "C" int tandem_emu_launch(const char* name, const uint32_t grid[3], const uint32_t block[3], uint32_t shared_bytes, const void* params,
                                 size_t params_len) {
    const KernelEntry* kernel = find_kernel(name);
    if (!kernel) return refuse(TANDEM_EMU_UNKNOWN_KERNEL, text("no kernel is named %s", name));
    dim3 g = {grid[0], grid[1], grid[2]}, b = {block[0], block[1], block[2]};
    u64 threads = (u64)b.x * b.y * b.z;
    if (!threads || b.x > MAX_THREADS || b.y > MAX_THREADS || b.z > 64 || threads > kernel->max_threads)
        return refuse(TANDEM_EMU_BAD_LAUNCH, text("kernel %s: a block of %s threads; it takes 1 to %u", name, text(b).c_str(), kernel->max_threads));
    if (!g.x || !g.y || !g.z || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
        return refuse(TANDEM_EMU_BAD_LAUNCH, text("kernel %s: a grid of %s blocks", name, text(g).c_str()));
    if (shared_bytes > MAX_SHARED)
        return refuse(TANDEM_EMU_BAD_LAUNCH, text("kernel %s: %u bytes of shared memory; a block has at most %u", name, shared_bytes, MAX_SHARED));
    if (params_len != kernel->params_size)
        return refuse(TANDEM_EMU_BAD_LAUNCH, text("kernel %s: %zu bytes of parameters, its struct has %zu", name, params_len, kernel->params_size));
    return launch(*kernel, g, b, shared_bytes, params);
}

extern "C" const char* tandem_emu_last_error(void) { return last_error.c_str(); }
extern "C" int tandem_emu_has_kernel(const char* name) { return find_kernel(name) != nullptr; }
extern "C" size_t tandem_emu_params_size(const char* name) {
    const KernelEntry* kernel = find_kernel(name);
    return kernel ? kernel->params_size : 0;
}
extern "C" size_t tandem_emu_kernel_count(void) { return kernels().size(); }
extern "C" const char* tandem_emu_kernel_name(size_t index) {
    if (index >= kernels().size()) return nullptr;
    return std::next(kernels().begin(), (long)index)->second->name;
}

extern "C" void tandem_emu_configure(const struct tandem_emu_config* to) { config = *to; }
extern "C" void tandem_emu_stats(struct tandem_emu_stats* out) { *out = totals; }
extern "C" void tandem_emu_stats_reset(void) { totals = {}; }
extern "C" int tandem_emu_kernel_stats(const char* name, struct tandem_emu_stats* out) {
    std::lock_guard<std::mutex> guard(global().mutex);
    auto found = global().of_kernel.find(name);
    *out = found == global().of_kernel.end() ? Stats{} : found->second;
    return found != global().of_kernel.end();
}
