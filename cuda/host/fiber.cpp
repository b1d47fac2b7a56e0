// fiber.cpp    a CUDA thread is a fiber: a stack of its own, switched to in a few instructions
//
// A switch costs some 5 ns plus cache misses; with an OS thread a barrier of 256 would cost 100 µs and more.
#include "machine.h"

#include <sys/mman.h>

#include <cstdlib>

// Saves what a callee must preserve, takes the other stack, restores.
extern "C" void emu_switch_stack(void** save, void* load);
asm(R"(
.text
.globl emu_switch_stack
.type emu_switch_stack, @function
emu_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch_stack, . - emu_switch_stack
)");

namespace emu {

constexpr size_t GUARD = 4096;
constexpr size_t STRIDE = STACK_BYTES + GUARD;

static void fiber_main() {
    machine->kernel->run(machine->params);
    end_thread();
}

void switch_stack(void** save, void* load) { emu_switch_stack(save, load); }

void prepare_stack(u32 thread) {
    Machine& m = *machine;
    if (!m.stacks) {
        void* all = mmap(nullptr, STRIDE * MAX_THREADS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED) abort(); // 68 MiB of address space
        m.stacks = static_cast<u8*>(all);
    }
    for (; m.stacks_ready <= thread; m.stacks_ready++) // below each stack a page stays inaccessible
        if (mprotect(m.stacks + m.stacks_ready * STRIDE + GUARD, STACK_BYTES, PROT_READ | PROT_WRITE)) abort();
    Thread& t = m.threads[thread];
    t.stack_low = m.stacks + thread * STRIDE + GUARD;
    // Stacks a multiple of 4 KiB apart would all use the same few sets of the L1 cache: shift them.
    u64* top = reinterpret_cast<u64*>(t.stack_low + STACK_BYTES - (thread * 192) % 4096 - 64);
    *--top = 0; // fiber_main must find the stack as after a call: 8 below a multiple of 16
    *--top = reinterpret_cast<u64>(&fiber_main);
    for (int i = 0; i < 6; i++) *--top = 0;
    t.stack_pointer = top;
}

Machine::Machine() : threads{}, clocks{}, random(0), stats{}, stacks(nullptr), stacks_ready(0) {}

Machine::~Machine() {
    if (stacks) munmap(stacks, STRIDE * MAX_THREADS);
}

} // namespace emu
