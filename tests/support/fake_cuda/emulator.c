/* emulator.c    kernels run by their host emulation (cuda/host/), of which this library has a copy of its own
 *
 * Where it is not linked, kernels do nothing. fake_set_launcher puts another executor in its place: it returns 0, or writes why the
 * kernel failed. */
#include "fake.h"

#include "api.h"
#pragma weak tandem_emu_launch
#pragma weak tandem_emu_last_error
#pragma weak tandem_emu_params_size
#pragma weak tandem_emu_register
#pragma weak tandem_emu_unregister
#pragma weak tandem_emu_mark_initialised
#pragma weak tandem_emu_mark_uninitialised
#pragma weak tandem_emu_is_initialised
#pragma weak tandem_emu_configure
#pragma weak tandem_emu_tensor_map_2d

typedef int Launcher(const char* kernel, const unsigned grid[3], const unsigned block[3], unsigned shared, const void* params, size_t bytes,
                     char* why, size_t room);

static int linked(void) { return tandem_emu_launch != 0; }

static int emulate(const char* kernel, const unsigned grid[3], const unsigned block[3], unsigned shared, const void* params, size_t bytes, char* why,
                   size_t room) {
    static __thread int configured;
    if (!configured) {
        /* Blocks and threads in one order, and for odd seeds in the other. */
        const char* order = getenv("FAKE_ORDER");
        const char* number = order ? strchr(order, ':') : 0;
        unsigned long seed = number ? strtoul(number + 1, 0, 10) : 0;
        int odd = seed % 2;
        struct tandem_emu_config config = {
            .schedule = odd ? TANDEM_EMU_DESCENDING : TANDEM_EMU_ASCENDING,
            .copies = TANDEM_EMU_COPIES_AT_WAIT,
            .checks = env("FAKE_CHECKS", TANDEM_EMU_ALL),
            .seed = seed,
        };
        tandem_emu_configure(&config);
        configured = 1;
    }
    if (env("FAKE_PLAIN", 0) && !plainly(kernel, params)) {
        LOCK;
        ++*count("plain");
        return 0;
    }
    int r = tandem_emu_launch(kernel, grid, block, shared, params, bytes);
    if (r) snprintf(why, room, "%s", tandem_emu_last_error());
    return r;
}

static Launcher* launcher;
void fake_set_launcher(Launcher* f) {
    LOCK;
    launcher = f;
}

size_t params_of(const char* kernel) { return linked() ? tandem_emu_params_size(kernel) : 0; }
Result run_kernel(const Work* w) {
    if (!launcher && !linked()) return 0;
    char why[2000] = "";
    const char* kernel = w->function->name;
    void* before = before_wrong(kernel);
    int r = (launcher ? launcher : emulate)(kernel, w->grid, w->block, w->shared, w->staged, w->params, why, sizeof why);
    after_wrong(before);
    if (!r) return 0;
    int outside = strstr(why, "no device memory") || strstr(why, "of an allocation") || strstr(why, "before an allocation");
    int illegal = outside && !strstr(why, "nobody wrote");
    return failed(illegal ? ILLEGAL_ADDRESS : LAUNCH_FAILED, "%s%s%s", strncmp(why, "kernel ", 7) ? "kernel " : "", strncmp(why, "kernel ", 7) ? kernel : "", why);
}

void register_memory(uint64_t at, size_t bytes, int initialised) {
    if (linked()) tandem_emu_register((void*)at, bytes, initialised);
}
void unregister_memory(uint64_t at) {
    if (linked()) tandem_emu_unregister((void*)at);
}
void written(uint64_t at, size_t bytes) {
    if (linked()) tandem_emu_mark_initialised((void*)at, bytes);
}
/* A copy of what nobody wrote is nobody's either. (Of much, of which a part was written, all counts as written: looking would
 * take long.) */
void copied_marks(uint64_t to, uint64_t from, size_t bytes) {
    if (!linked() || !bytes) return;
    if (bytes > 64 << 10 || tandem_emu_is_initialised((void*)from, bytes)) return written(to, bytes);
    if (bytes == 1) return tandem_emu_mark_uninitialised((void*)to, 1);
    copied_marks(to, from, bytes / 2);
    copied_marks(to + bytes / 2, from + bytes / 2, bytes - bytes / 2);
}
Result encode_map(uint64_t* map, void* base, const uint64_t* size, uint64_t stride, const unsigned* box) {
    if (!linked()) return 801;
    return tandem_emu_tensor_map_2d(map, base, size[1], size[0], stride / 2, box[1], box[0]) ? INVALID_VALUE : 0;
}
