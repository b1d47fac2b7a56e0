// access.cpp    every load and store of a kernel passes here
//
// Kernels are compiled with -fsanitize=thread, which puts a call before each access that another thread might see;
// these are those calls (libtsan is not linked). An access that must not happen does not: the block is left first.
#include "machine.h"

#include <cstring>
#include <time.h>

namespace emu {

void check(const void* at, size_t bytes, Access access, const Place& place) {
    Machine& m = *machine;
    if ((size_t)((const u8*)at - self->stack_low) < STACK_BYTES) return; // its own variables
    if (m.config.schedule == TANDEM_EMU_PREEMPTED && --m.until_preemption == 0) {
        m.until_preemption = 1 + (u32)(random_number() % 256);
        yield();
    }
    if (!m.config.checks) return;
    size_t offset = (size_t)((const u8*)at - m.shared);
    if (offset < m.shared_bytes)
        check_shared(offset, bytes, access, stamp_of(*self), place);
    else
        check_global(at, bytes, access, place);
}

static void check_aligned(const void* at, size_t bytes, Access access, const void* code) {
    if ((size_t)at % bytes && checks(TANDEM_EMU_BOUNDS))
        fail(code, "%s %zu bytes at %p: misaligned", access == Access::WRITE ? "writes" : "reads", bytes, at);
    check(at, bytes, access, code);
}

// ---------------------------------------------------------------------------------------------------------
// Loads and stores with a meaning of their own.

Words4 load_stream_16(const void* at, Site site) {
    Words4 v;
    if (machine->config.checks) {
        if ((size_t)at % 16) fail(site, "ld_stream_16 from %p: not 16-byte aligned", at);
        if (in_shared(at)) fail(site, "ld_stream_16 from shared memory");
        check(at, 16, Access::READ, site);
    }
    memcpy(&v, at, 16);
    return v;
}

// Who polls a word waits for another thread of its block, or would wait for ever: blocks run one after another.
static void let_others_run(Site site) {
    constexpr u64 MANY = 100'000'000;
    if (++machine->spins > MANY) fail(site, "polls a word that nobody writes: another block's? blocks run one after another here");
    yield();
}

u32 load_word(const u32* at, bool acquire, Site site) {
    check(at, 4, Access::ATOMIC, site);
    let_others_run(site);
    if (acquire) machine->acquired = true;
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

void store_release(u32* at, u32 value, Site site) {
    check(at, 4, Access::ATOMIC, site);
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

void fence() {
    machine->acquired = true;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void check_atomic(const void* at, Site site) {
    if ((size_t)at % 4) fail(site, "atomic at %p: misaligned", at);
    check(at, 4, Access::ATOMIC, site);
    machine->acquired = true;
}

u32 atomic_add(u32* at, u32 value, Site site) {
    check_atomic(at, site);
    return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
}
float atomic_add(float* at, float value, Site site) {
    check_atomic(at, site);
    u32* word = reinterpret_cast<u32*>(at);
    u32 old = __atomic_load_n(word, __ATOMIC_RELAXED), sum;
    do sum = __float_as_uint(__uint_as_float(old) + value);
    while (!__atomic_compare_exchange_n(word, &old, sum, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return __uint_as_float(old);
}
u32 atomic_max(u32* at, u32 value, Site site) {
    check_atomic(at, site);
    u32 old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &old, old < value ? value : old, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
    return old;
}
u32 atomic_exchange(u32* at, u32 value, Site site) {
    check_atomic(at, site);
    return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}
u32 atomic_compare_exchange(u32* at, u32 expected, u32 value, Site site) {
    check_atomic(at, site);
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    return expected;
}

} // namespace emu

// ---------------------------------------------------------------------------------------------------------
// The compiler's calls.

using namespace emu;

#define HERE __builtin_return_address(0)
#define ACCESS_HOOKS(n)                                                                                                   \
    extern "C" void __tsan_read##n(void* at) {                                                                            \
        if (watching) check_aligned(at, n, Access::READ, HERE);                                                           \
    }                                                                                                                     \
    extern "C" void __tsan_write##n(void* at) {                                                                           \
        if (watching) check_aligned(at, n, Access::WRITE, HERE);                                                          \
    }                                                                                                                     \
    extern "C" void __tsan_read_write##n(void* at) {                                                                      \
        if (watching) check_aligned(at, n, Access::READ, HERE), check_aligned(at, n, Access::WRITE, HERE);                \
    }                                                                                                                     \
    extern "C" void __tsan_volatile_read##n(void* at) { __tsan_read##n(at); }                                             \
    extern "C" void __tsan_volatile_write##n(void* at) { __tsan_write##n(at); }                                           \
    extern "C" void __tsan_unaligned_read##n(void* at) {                                                                  \
        if (watching) check(at, n, Access::READ, HERE);                                                                   \
    }                                                                                                                     \
    extern "C" void __tsan_unaligned_write##n(void* at) {                                                                 \
        if (watching) check(at, n, Access::WRITE, HERE);                                                                  \
    }                                                                                                                     \
    extern "C" void __tsan_unaligned_volatile_read##n(void* at) { __tsan_unaligned_read##n(at); }                         \
    extern "C" void __tsan_unaligned_volatile_write##n(void* at) { __tsan_unaligned_write##n(at); }
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)

extern "C" void __tsan_read_range(void* at, size_t bytes) {
    if (watching && bytes) check(at, bytes, Access::READ, HERE);
}
extern "C" void __tsan_write_range(void* at, size_t bytes) {
    if (watching && bytes) check(at, bytes, Access::WRITE, HERE);
}

// What else instrumented code may call, of no interest here.
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_read(void*) {}
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
extern "C" void __tsan_atomic_signal_fence(int) {}

// C++ atomics: a kernel has atomicAdd and the like, but static guards of the compiler use a few.
#define ATOMIC_HOOKS(bits, T)                                                                                              \
    extern "C" T __tsan_atomic##bits##_load(const volatile T* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }   \
    extern "C" void __tsan_atomic##bits##_store(volatile T* at, T v, int) { __atomic_store_n(at, v, __ATOMIC_SEQ_CST); }   \
    extern "C" T __tsan_atomic##bits##_exchange(volatile T* at, T v, int) { return __atomic_exchange_n(at, v, __ATOMIC_SEQ_CST); } \
    extern "C" T __tsan_atomic##bits##_fetch_add(volatile T* at, T v, int) { return __atomic_fetch_add(at, v, __ATOMIC_SEQ_CST); } \
    extern "C" int __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T v, int, int) {             \
        return __atomic_compare_exchange_n(at, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                    \
    }
ATOMIC_HOOKS(8, u8)
ATOMIC_HOOKS(16, u16)
ATOMIC_HOOKS(32, u32)
ATOMIC_HOOKS(64, u64)
