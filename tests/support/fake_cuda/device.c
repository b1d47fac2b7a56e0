/* device.c    the driver, its devices, their primary context */
#include "fake.h"

Result cuGetErrorName(Result code, const char** name) {
    *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : code == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_FAKE";
    return 0;
}
Result cuGetErrorString(Result code, const char** text) {
    *text = code == 700   ? "an illegal memory access was encountered"
            : code == 719 ? "unspecified launch failure"
            : code == 900 ? "operation not permitted when stream is capturing"
                          : "a fake error";
    return 0;
}
Result cuInit(unsigned flags) { CALL; return flags; }
Result cuDriverGetVersion(int* out) { CALL; *out = env("FAKE_VERSION", 13000); return 0; }
Result cuDeviceGetCount(int* out) { CALL; *out = env("FAKE_DEVICES", 1); return 0; }
Result cuDeviceGet(int* out, int ordinal) { CALL; *out = ordinal; return 0; }
Result cuDeviceGetName(char* out, int len, int device) {
    CALL;
    const char* name = getenv("FAKE_NAME");
    snprintf(out, len, name ? "Fake %d %s" : "Fake %d", device, name);
    return 0;
}
Result cuDeviceTotalMem_v2(size_t* out, int device) { CALL; (void)device; *out = total_memory(); return 0; }
Result cuDeviceGetAttribute(int* out, int which, int device) {
    CALL;
    (void)device;
    long sm = env("FAKE_SM", 90);
    *out = which == 75 ? sm / 10 : which == 76 ? sm % 10 : which == 16 ? env("FAKE_UNITS", 4) : which == 97 ? 232448 : which == 38 ? 60 << 20 : which == 19 ? env("FAKE_MAPS", 1)
         : which == 36 ? 1593000 : which == 37 ? 5120 : which == 13 ? 1755000 : -1;
    return *out < 0;
}

/* One context, however often it is retained. */
static int contexts;
Result cuDevicePrimaryCtxRetain(void** out, int device) {
    CALL;
    static void* one;
    (void)device;
    if (!contexts) {
        Result r = charge(context_memory());
        if (r) return r;
        one = keep(malloc(1), 1, "context");
    }
    contexts++;
    *out = one;
    return 0;
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
    LOCK;
    (void)device;
    if (!contexts) return fprintf(stderr, "fake driver: no context\n"), INVALID_CONTEXT;
    if (--contexts) return 0;
    discharge(context_memory());
    for (Node* n = live; n; n = n->next)
        if (!strcmp(n->kind, "context")) return drop(n->at, "context", 0);
    return 1;
}
Result cuCtxSetCurrent(void* context) { CALL; current = context; return 0; }
Result cuCtxSynchronize(void) {
    /* Long enough for another thread to begin a capture. */
    usleep(200);
    IN_CONTEXT;
    int conflict = 0;
    for (int i = 0; i < n_streams; i++) {
        if (!streams[i]) continue;
        if (streams[i]->capturing) conflict = streams[i]->invalidated = 1;
    }
    if (conflict || prohibited()) return CAPTURE_UNSUPPORTED;
    for (int i = 0; i < n_streams; i++)
        if (streams[i]) wait_for(streams[i], streams[i]->given);
    return sticky;
}
