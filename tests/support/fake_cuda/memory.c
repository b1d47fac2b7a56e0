/* memory.c    the device's memory, and page-locked memory of the host
 *
 * Device memory comes in granules of 2 MiB, of FAKE_MEMORY bytes in all; allocations of at most half a granule share some. No address is given out twice. What is fresh holds 0xff in
 * every byte, and for kernels nobody has written it; what was given back is not there any more.
 *
 * While nothing runs the program cannot read or write device memory through its addresses (it ends by SIGSEGV). While work runs it
 * could, unseen: kernels use the same addresses. Without FAKE_ORDER, or with FAKE_CHECKS=0, it always could.
 *
 * As Windows' driver does it below WSL (FAKE_SPILLS), what does not fit is no error: it lies in the host's memory, as slow as that is,
 * and only stderr says so. FAKE_TAKEN is another process, which takes memory behind a question about it. */
#include "fake.h"

#define GRANULE ((size_t)2 << 20)
#define ADDRESSES ((size_t)1 << 40)

static const char device_memory[] = "memory";
static char* arena;
static size_t begun, held, small;
static int hidden;
static size_t given_total, given_overhead; /* by fake_set_memory; 0: by the environment */

size_t granules(size_t bytes) { return (bytes + GRANULE - 1) / GRANULE * GRANULE; }
size_t total_memory(void) { return given_total ? given_total : env("FAKE_MEMORY", 64 << 20); }
/* A context takes memory of its own: some 300 MiB on a device that is not tiny. */
size_t context_memory(void) {
    if (given_total) return given_overhead;
    return env("FAKE_CONTEXT", total_memory() >= (size_t)4 << 30 ? 300 << 20 : 0);
}
static size_t unused(void) { return held < total_memory() ? total_memory() - held : 0; }
/* Another device in the place of this one, of so many bytes, of which a context takes some: many sizes in one process. Nothing of the
 * first may be in use: otherwise the bytes that are. Addresses are those of a new device, too. */
size_t fake_set_memory(size_t bytes, size_t context) {
    LOCK;
    if (held) return held;
    given_total = bytes, given_overhead = context, begun = 0;
    return 0;
}
Result charge(size_t bytes) {
    if (bytes > unused()) {
        if (!env("FAKE_SPILLS", 0)) return OUT_OF_MEMORY;
        fprintf(stderr, "fake driver: spills %zu bytes to the host\n", bytes - unused());
    }
    held += bytes;
    return 0;
}
void discharge(size_t bytes) { held -= bytes; }

/* The same for an allocation; small ones are taken to lie without gaps. */
static size_t packed(size_t bytes) { return (bytes + 511) / 512 * 512; }
static Result charge_allocation(size_t bytes) {
    if (bytes > GRANULE / 2) return charge(granules(bytes));
    Result r = charge(granules(small + packed(bytes)) - granules(small));
    if (!r) small += packed(bytes);
    return r;
}
static void discharge_allocation(size_t bytes) {
    if (bytes > GRANULE / 2) { discharge(granules(bytes)); return; }
    discharge(granules(small) - granules(small - packed(bytes)));
    small -= packed(bytes);
}

void show_device_memory(int shown) {
    /* Of many pieces, hiding takes longer than what they do: where nothing is checked, this is not either. */
    static int checks = -1;
    if (checks < 0) checks = env("FAKE_CHECKS", 1) != 0;
    if (!checks || !arena || shown == !hidden) return;
    hidden = !shown;
    /* Piece by piece: the range that was ever given out takes a hundred times as long, and what was given back stays away. */
    for (Node* n = live; n; n = n->next)
        if (n->kind == device_memory) mprotect(n->at, n->bytes, hidden ? PROT_NONE : PROT_READ | PROT_WRITE);
}

Result cuMemAlloc_v2(uint64_t* out, size_t bytes) {
    UNSAFE;
    size_t size = granules(bytes);
    if (!bytes || size < bytes) return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
    if (!arena) {
        arena = mmap(0, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena == MAP_FAILED) abort();
        arena = (char*)(((uintptr_t)arena + GRANULE - 1) / GRANULE * GRANULE);
    }
    /* A granule without memory lies behind each. */
    if (begun + size + 2 * GRANULE > ADDRESSES) return failed(OUT_OF_MEMORY, "all addresses were given out once");
    Result r = charge_allocation(bytes);
    if (r) return r;
    char* at = arena + begun;
    begun += size + GRANULE;
    mprotect(at, bytes, PROT_READ | PROT_WRITE);
    memset(at, 0xff, bytes);
    if (hidden) mprotect(at, bytes, PROT_NONE);
    register_memory((uint64_t)at, bytes, 0);
    *out = (uint64_t)keep(at, bytes, device_memory);
    return 0;
}
Result cuMemFree_v2(uint64_t at) {
    GIVE_BACK;
    size_t bytes = 0;
    Result r = drop((void*)at, device_memory, &bytes);
    if (r) return r;
    discharge_allocation(bytes);
    unregister_memory(at);
    madvise((void*)at, bytes, MADV_DONTNEED);
    mprotect((void*)at, bytes, PROT_NONE);
    return 0;
}
Result cuMemGetInfo_v2(size_t* free_, size_t* all) {
    IN_CONTEXT;
    static int questions;
    int at = 0;
    size_t bytes = 0;
    *all = total_memory(), *free_ = unused();
    const char* taken = getenv("FAKE_TAKEN");
    if (taken && sscanf(taken, "%d:%zu", &at, &bytes) == 2 && ++questions == at) held += bytes < unused() ? bytes : unused();
    return 0;
}

/* ---- the host's ---- */

static int mapped(const Node* n) { return !strcmp(n->kind, "mapped memory"); }
static void see(const Node* n) {
    /* Kernels may touch mapped memory only. What the host wrote there nobody saw. */
    if (mapped(n)) register_memory((uint64_t)n->at, n->bytes, 1);
}
static Result unsee(void* at) {
    Node* n = find((uint64_t)at, 1);
    if (n && mapped(n)) unregister_memory((uint64_t)at);
    return drop(at, n ? n->kind : "page-locked memory", 0);
}

Result cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
    UNSAFE;
    if ((flags & 2) && !env("FAKE_MAPS", 1)) return INVALID_VALUE;
    void* at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    memset(at, 0xa5, bytes);
    *count("KiB of the driver's host memory") += bytes >> 10;
    *out = keep(at, bytes, flags & 2 ? "mapped memory" : "pinned memory");
    see(live);
    return 0;
}
Result cuMemFreeHost(void* at) {
    GIVE_BACK;
    Node* n = find((uint64_t)at, 1);
    size_t bytes = n ? n->bytes : 0;
    Result r = unsee(at);
    if (!r) munmap(at, bytes);
    return r;
}
Result cuMemHostRegister_v2(void* at, size_t bytes, unsigned flags) {
    UNSAFE;
    if ((uintptr_t)at % 4096) return INVALID_VALUE;
    if ((flags & 2) && !env("FAKE_MAPS", 1)) return INVALID_VALUE;
    if (find((uint64_t)at, 1)) return ALREADY_REGISTERED;
    *count("KiB of registered memory") += bytes >> 10;
    keep(at, bytes, flags & 2 ? "mapped memory" : "pinned memory");
    see(live);
    return 0;
}
Result cuMemHostUnregister(void* at) { GIVE_BACK; return unsee(at); }
Result cuMemHostGetDevicePointer_v2(uint64_t* out, void* at, unsigned flags) {
    IN_CONTEXT;
    Node* n = find((uint64_t)at, 1);
    if (!n || !mapped(n) || flags) return INVALID_VALUE;
    *out = (uint64_t)at;
    return 0;
}

/* ---- for executors other than the emulator ---- */

/* What kernels may touch around these bytes, from *base to *end; 0: they may not touch them. */
int fake_range(uint64_t at, size_t bytes, uint64_t* base, uint64_t* end) {
    LOCK;
    Node* n = find(at, bytes);
    if (!n || (strcmp(n->kind, "memory") && !mapped(n))) return 0;
    *base = (uint64_t)n->at, *end = *base + n->bytes;
    return 1;
}
