/* api.h    the emulator, seen from outside: cuLaunchKernel's shape, memory, configuration, counters
 *
 * Plain C. Every function may be called from any thread; what a launch does is told per calling thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TANDEM_EMU_OK = 0,
    TANDEM_EMU_UNKNOWN_KERNEL = 1,
    TANDEM_EMU_BAD_LAUNCH = 2, /* shape, shared memory or size of the parameters */
    TANDEM_EMU_FAULT = 3       /* the checker found something, or the block is deadlocked */
};

/* Order in which threads of a block (and blocks) run. */
enum {
    TANDEM_EMU_ASCENDING = 0,
    TANDEM_EMU_DESCENDING = 1,
    TANDEM_EMU_RANDOM = 2,    /* another thread at every barrier, collective and wait */
    TANDEM_EMU_PREEMPTED = 3  /* and in the midst of loads and stores */
};

/* When asynchronous copies land and asynchronous matrix products read. */
enum {
    TANDEM_EMU_COPIES_AT_ONCE = 0,
    TANDEM_EMU_COPIES_AT_WAIT = 1, /* as late as is allowed */
    TANDEM_EMU_COPIES_RANDOM = 2
};

/* What is checked; bits. */
enum {
    TANDEM_EMU_BOUNDS = 1,        /* and alignment; without it a stray access is a stray access of this process */
    TANDEM_EMU_RACES = 2,         /* in shared memory */
    TANDEM_EMU_UNINITIALISED = 4, /* reads of shared and of device memory that nobody wrote */
    TANDEM_EMU_GLOBAL_RACES = 8,  /* in device memory, within and between blocks of one launch */
    TANDEM_EMU_ALL = 15
};

struct tandem_emu_config {
    uint32_t schedule;
    uint32_t copies;
    uint32_t checks;
    uint32_t reserved;
    uint64_t seed;
};

struct tandem_emu_stats {
    uint64_t launches;
    uint64_t blocks;
    uint64_t mma;                /* warp-wide, wgmma counted as its m16n8k16 */
    uint64_t ldmatrix_phases;    /* eight rows each */
    uint64_t ldmatrix_conflicts; /* additional passes through the banks */
    uint64_t switches;           /* from thread to thread */
    uint64_t barriers;
    uint64_t async_copies;
};

/* Runs a kernel to its end. `params` is its parameter struct, `params_len` its size. */
int tandem_emu_launch(const char* kernel, const uint32_t grid[3], const uint32_t block[3], uint32_t shared_bytes, const void* params,
                      size_t params_len);
/* What the calling thread's latest failed launch did wrong: kernel, block, thread, place, deed. */
const char* tandem_emu_last_error(void);

int tandem_emu_has_kernel(const char* kernel);
size_t tandem_emu_params_size(const char* kernel); /* of its parameter struct; 0: no such kernel */
size_t tandem_emu_kernel_count(void);
const char* tandem_emu_kernel_name(size_t index); /* sorted; NULL past the end */

/* Memory that kernels may touch. It must stay mapped until unregistered; a running launch keeps the view it
 * began with. `initialised` 0: reading a byte before a kernel or the host wrote it is an error. */
void tandem_emu_register(void* base, size_t len, int initialised);
void tandem_emu_unregister(void* base);
void tandem_emu_mark_initialised(void* at, size_t len);
/* Forgets that the bytes were written (memory given back to an arena). */
void tandem_emu_mark_uninitialised(void* at, size_t len);
int tandem_emu_is_initialised(const void* at, size_t len);

/* For launches of the calling thread. Initially: ascending, copies at wait, all checks, seed 0. */
void tandem_emu_configure(const struct tandem_emu_config* config);

/* Totals of the calling thread's launches, and of all launches of one kernel in this process (0: unknown). */
void tandem_emu_stats(struct tandem_emu_stats* out);
void tandem_emu_stats_reset(void);
int tandem_emu_kernel_stats(const char* kernel, struct tandem_emu_stats* out);

/* Runtime::tensor_map_2d. Nonzero where cuTensorMapEncodeTiled would refuse. */
int tandem_emu_tensor_map_2d(void* out128, void* base, uint64_t rows, uint64_t cols, uint64_t stride_elements, uint32_t box_rows,
                             uint32_t box_cols);

#ifdef __cplusplus
}
#endif
