/* fake_cuda.c    a CUDA driver without a GPU: host memory, work done at once, errors on demand, rules of use checked
 *
 * For tests of src/device/cuda/: what it asks of the driver, in which order, and what it makes of errors. Kernels do
 * nothing. Environment:
 *   FAKE_VERSION   what cuDriverGetVersion says (13000)        FAKE_SM      compute capability (90)
 *   FAKE_DEVICES   how many (1)                                FAKE_MEMORY  bytes of memory (64 MiB)
 *   FAKE_REGISTERS what every function has (168)
 *   FAKE_FAIL      "cuLaunchKernel:700:3": the third call of this function returns this code (":3:2": and the one
 *                  after it); codes of 700 and more are then returned by every call, as the driver does
 * It says what is loaded. At exit it prints what was not given back. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef struct Node { void* at; size_t bytes; const char* kind; struct Node* next; } Node;

static Node* live;
static size_t used;
static Result sticky;
static int capturing, recorded, launched;
static __thread void* current;
static __thread int mode = 1; /* thread-local capture mode: global */

static long env(const char* name, long otherwise) { return getenv(name) ? atol(getenv(name)) : otherwise; }

static Result begin(const char* function) {
    static int calls;
    const char* plan = getenv("FAKE_FAIL");
    size_t n = strlen(function);
    if (sticky) return sticky;
    if (plan && !strncmp(plan, function, n) && plan[n] == ':') {
        int code = 0, at = 1, times = 1;
        sscanf(plan + n, ":%d:%d:%d", &code, &at, &times);
        if (++calls >= at && calls < at + times) {
            if (code >= 700 && code != 701) sticky = code;
            return code;
        }
    }
    return 0;
}
#define CALL                                 \
    do {                                     \
        Result r_ = begin(__func__);         \
        if (r_) return r_;                   \
    } while (0)
#define IN_CONTEXT                           \
    do {                                     \
        CALL;                                \
        if (!current) return 201;            \
    } while (0)
/* Refused while a stream is being recorded, unless the thread has said that it knows. */
#define UNSAFE                               \
    do {                                     \
        IN_CONTEXT;                          \
        if (capturing && mode != 2) return 900; \
    } while (0)

static void* keep(void* at, size_t bytes, const char* kind) {
    Node* node = malloc(sizeof *node);
    *node = (Node){at, bytes, kind, live};
    live = node;
    return at;
}
static Result drop(void* at, const char* kind, size_t* bytes) {
    for (Node** p = &live; *p; p = &(*p)->next)
        if ((*p)->at == at && !strcmp((*p)->kind, kind)) {
            Node* node = *p;
            if (bytes) *bytes = node->bytes;
            *p = node->next;
            free(node);
            return 0;
        }
    fprintf(stderr, "fake driver: no %s at %p\n", kind, at);
    return 1;
}
static int inside(uint64_t at, size_t bytes) {
    for (Node* n = live; n; n = n->next)
        if (at >= (uint64_t)n->at && at + bytes <= (uint64_t)n->at + n->bytes) return 1;
    return 0;
}

__attribute__((destructor)) static void leaks(void) {
    for (Node* n = live; n; n = n->next) fprintf(stderr, "fake driver: leaked %s\n", n->kind);
    if (capturing) fprintf(stderr, "fake driver: still recording\n");
    fprintf(stderr, "fake driver: %d launches\n", launched);
}

Result cuGetErrorName(Result code, const char** name) { *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_FAKE"; return 0; }
Result cuGetErrorString(Result code, const char** text) { *text = code == 700 ? "an illegal memory access was encountered" : "a fake error"; return 0; }
Result cuInit(unsigned flags) { CALL; return flags; }
Result cuDriverGetVersion(int* out) { CALL; *out = env("FAKE_VERSION", 13000); return 0; }
Result cuDeviceGetCount(int* out) { CALL; *out = env("FAKE_DEVICES", 1); return 0; }
Result cuDeviceGet(int* out, int ordinal) { CALL; *out = ordinal; return 0; }
Result cuDeviceGetName(char* out, int len, int device) { CALL; snprintf(out, len, "Fake %d", device); return 0; }
Result cuDeviceTotalMem_v2(size_t* out, int device) { CALL; (void)device; *out = env("FAKE_MEMORY", 64 << 20); return 0; }
Result cuDeviceGetAttribute(int* out, int which, int device) {
    CALL;
    (void)device;
    *out = which == 75 ? env("FAKE_SM", 90) / 10 : which == 76 ? env("FAKE_SM", 90) % 10 : which == 16 ? 4 : which == 97 ? 232448 : -1;
    return *out < 0;
}
Result cuDevicePrimaryCtxRetain(void** out, int device) { CALL; (void)device; *out = keep(malloc(1), 1, "context"); return 0; }
Result cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    for (Node* n = live; n; n = n->next)
        if (!strcmp(n->kind, "context")) return drop(n->at, "context", 0);
    return 1;
}
Result cuCtxSetCurrent(void* context) { CALL; current = context; return 0; }
Result cuCtxSynchronize(void) { UNSAFE; return 0; }
Result cuThreadExchangeStreamCaptureMode(int* m) { int old = mode; mode = *m; *m = old; return 0; }

Result cuStreamCreate(void** out, unsigned flags) { IN_CONTEXT; if (flags != 1) return 1; *out = keep(malloc(1), 1, "stream"); return 0; }
Result cuStreamDestroy_v2(void* s) { IN_CONTEXT; return drop(s, "stream", 0); }
Result cuStreamSynchronize(void* s) { IN_CONTEXT; return !s; }
Result cuStreamWaitEvent(void* s, void* e, unsigned flags) { IN_CONTEXT; return !s || !inside((uint64_t)e, 1) || flags; }
Result cuEventCreate(void** out, unsigned flags) { IN_CONTEXT; if (flags != 2) return 1; *out = keep(malloc(1), 1, "event"); return 0; }
Result cuEventDestroy_v2(void* e) { IN_CONTEXT; return drop(e, "event", 0); }
Result cuEventRecord(void* e, void* s) { IN_CONTEXT; return !s || !inside((uint64_t)e, 1); }
Result cuEventQuery(void* e) { IN_CONTEXT; return !inside((uint64_t)e, 1); }
Result cuEventSynchronize(void* e) { IN_CONTEXT; return !inside((uint64_t)e, 1); }

Result cuMemAlloc_v2(uint64_t* out, size_t bytes) {
    UNSAFE;
    if (used + bytes > (size_t)env("FAKE_MEMORY", 64 << 20)) return 2;
    used += bytes;
    *out = (uint64_t)keep(aligned_alloc(256, (bytes + 255) / 256 * 256), bytes, "memory");
    return 0;
}
Result cuMemFree_v2(uint64_t at) {
    UNSAFE;
    size_t bytes = 0;
    Result r = drop((void*)at, "memory", &bytes);
    used -= bytes;
    if (!r) free((void*)at);
    return r;
}
Result cuMemGetInfo_v2(size_t* free_, size_t* total) { IN_CONTEXT; *total = env("FAKE_MEMORY", 64 << 20); *free_ = *total - used; return 0; }
Result cuMemHostAlloc(void** out, size_t bytes, unsigned flags) { UNSAFE; if (!(flags & 2)) return 1; *out = keep(malloc(bytes), bytes, "pinned memory"); return 0; }
Result cuMemFreeHost(void* at) { UNSAFE; Result r = drop(at, "pinned memory", 0); if (!r) free(at); return r; }
Result cuMemHostGetDevicePointer_v2(uint64_t* out, void* at, unsigned flags) { IN_CONTEXT; *out = (uint64_t)at; return flags; }

static Result work(void) {
    if (capturing) recorded++;
    return 0;
}
Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, void* s) { IN_CONTEXT; if (!inside(to, n) || !s) return 1; memcpy((void*)to, from, n); return work(); }
Result cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, void* s) { IN_CONTEXT; if (!inside(from, n) || !s) return 1; memcpy(to, (void*)from, n); return work(); }
Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void* s) { IN_CONTEXT; if (!inside(to, n) || !inside(from, n) || !s) return 1; memmove((void*)to, (void*)from, n); return work(); }
Result cuMemsetD8Async(uint64_t to, unsigned char v, size_t n, void* s) { IN_CONTEXT; if (!inside(to, n) || !s) return 1; memset((void*)to, v, n); return work(); }

/* A module: its names, copied, and the bytes of them. */
typedef struct Module { size_t bytes; char names[]; } Module;
static void* module_of(const char* image, size_t bytes) {
    Module* m = malloc(sizeof *m + bytes + 1);
    m->bytes = bytes;
    memcpy(m->names, image, bytes);
    m->names[bytes] = 0;
    return keep(m, 1, "module");
}
/* What a driver of FAKE_VERSION on a device of FAKE_SM does with machine code (ELF: ABI 7 of CUDA 12's assemblers, 8 of 13's)
 * and with PTX. */
static Result load_code(void** out, const char* elf) {
    const unsigned char* e = (const unsigned char*)elf;
    uint64_t sections; uint32_t flags; uint16_t size, count;
    memcpy(&sections, e + 40, 8), memcpy(&flags, e + 48, 4), memcpy(&size, e + 58, 2), memcpy(&count, e + 60, 2);
    int newer = e[8] >= 8, has = env("FAKE_SM", 90);
    int sm = newer ? flags >> 8 & 0xff : flags & 0xff;
    if (newer && env("FAKE_VERSION", 13000) < 13000) return 200;
    if (sm / 10 != has / 10 || sm > has) return 209;
    fprintf(stderr, "fake driver: loads machine code for %d\n", sm);
    *out = module_of(elf, sections + (uint64_t)size * count);
    return 0;
}
static Result load_ptx(void** out, const char* ptx) {
    const char *version = strstr(ptx, "\n.version "), *target = strstr(ptx, "\n.target sm_");
    int major = 0, minor = 0, sm = 0;
    if (!version || !target) return 218;
    sscanf(version, "\n.version %d.%d", &major, &minor), sscanf(target, "\n.target sm_%d", &sm);
    int needs = major >= 9 ? 13000 + 10 * minor : major == 8 ? 12000 + 10 * (minor > 5 ? minor + 1 : minor) : 11000 + 10 * minor;
    if (needs > env("FAKE_VERSION", 13000)) return 222;
    if (sm > env("FAKE_SM", 90)) return 209;
    fprintf(stderr, "fake driver: compiles PTX for %d\n", sm);
    *out = module_of(ptx, strlen(ptx));
    return 0;
}
Result cuModuleLoadDataEx(void** out, const char* image, unsigned n, int* options, void** values) {
    for (unsigned i = 0; i < n; i++)
        if (options[i] == 5) strcpy(values[i], "ptxas fatal : line 7: a fake complaint\n");
    UNSAFE;
    return memcmp(image, "\177ELF", 4) ? load_ptx(out, image) : load_code(out, image);
}
Result cuModuleUnload(void* m) { UNSAFE; Result r = drop(m, "module", 0); if (!r) free(m); return r; }
Result cuModuleGetFunction(void** out, void* m, const char* name) { IN_CONTEXT; Module* of = m; *out = memmem(of->names, of->bytes, name, strlen(name)); return *out ? 0 : 500; }
Result cuFuncGetAttribute(int* out, int which, void* f) { IN_CONTEXT; *out = env("FAKE_REGISTERS", 168); return !f || which != 4; }
Result cuFuncSetAttribute(void* f, int which, int value) { IN_CONTEXT; return !f || which != 8 || value > 232448; }
Result cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* s,
                      void** params, void** extra) {
    IN_CONTEXT;
    (void)shared;
    if (!f || !s || !params || extra || !gx || !gy || !gz || !bx || !by || !bz) return 1;
    if (capturing) return work();
    launched++;
    return 0;
}
Result cuStreamBeginCapture_v2(void* s, int m) { IN_CONTEXT; if (!s || m != 1 || capturing) return 901; capturing = 1; recorded = 0; return 0; }
Result cuStreamEndCapture(void* s, void** out) { IN_CONTEXT; if (!s || !capturing) return 901; capturing = 0; *out = keep(malloc(1), 1, "graph"); return 0; }
Result cuGraphDestroy(void* g) { return drop(g, "graph", 0); }
Result cuGraphInstantiateWithFlags(void** out, void* g, unsigned long long flags) { IN_CONTEXT; if (!g || flags) return 1; int* n = malloc(sizeof *n); *n = recorded; *out = keep(n, sizeof *n, "executable graph"); return 0; }
Result cuGraphExecDestroy(void* g) { UNSAFE; return drop(g, "executable graph", 0); }
Result cuGraphLaunch(int* g, void* s) { IN_CONTEXT; if (!s) return 1; launched += *g; return 0; }
Result cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, void* base, const uint64_t* size, const uint64_t* strides, const unsigned* box,
                              const unsigned* steps, int interleave, int swizzle, int l2, int fill) {
    IN_CONTEXT;
    if ((uint64_t)base % 16 || strides[0] % 16 || box[0] > 256 || box[1] > 256 || box[0] * 2 > 128 || rank != 2) return 1;
    uint64_t words[16] = {(uint64_t)base, size[0], size[1], strides[0], box[0], box[1], steps[0], steps[1], type, interleave, swizzle, l2, fill};
    memcpy(map, words, sizeof words);
    return 0;
}
