/* fake_cuda.c    a CUDA driver without a GPU: host memory, errors on demand, rules of use checked (fake_cuda.h)
 *
 * For tests of src/device/cuda/: what it asks of the driver, in which order, and what it makes of errors. Kernels do
 * nothing. Environment:
 *   FAKE_VERSION   what cuDriverGetVersion says (13000)        FAKE_SM      compute capability (90)
 *   FAKE_DEVICES   how many (1)                                FAKE_MEMORY  bytes of memory (64 MiB)
 *   FAKE_MAPS      whether devices map host memory (1)         FAKE_STUCK   no work is ever passed by asking (0)
 *   FAKE_KEEPS     the program keeps what it has to its end (0)
 *   FAKE_REGISTERS what every function has (168)
 *   FAKE_FAIL      "cuLaunchKernel:700:3": the third call of this function returns this code (0: every call; ":3:2":
 *                  and the one after it); codes that mean a lost device are then returned by every call, as the driver does
 * It says what is loaded. At exit it prints what was not given back. */
#define _GNU_SOURCE
#include "fake_cuda.h"

static int launched, contexts;

__attribute__((destructor)) static void leaks(void) {
    for (Node* n = env("FAKE_KEEPS", 0) ? 0 : live; n; n = n->next) fprintf(stderr, "fake driver: leaked %s\n", n->kind);
    if (any_capture()) fprintf(stderr, "fake driver: still recording\n");
    fprintf(stderr, "fake driver: %d launches\n", launched);
}

Result cuGetErrorName(Result code, const char** name) {
    *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_FAKE";
    return 0;
}
Result cuGetErrorString(Result code, const char** text) {
    *text = code == 700 ? "an illegal memory access was encountered" : code == 900 ? "operation not permitted when stream is capturing" : "a fake error";
    return 0;
}
Result cuInit(unsigned flags) { CALL; return flags; }
Result cuDriverGetVersion(int* out) { CALL; *out = env("FAKE_VERSION", 13000); return 0; }
Result cuDeviceGetCount(int* out) { CALL; *out = env("FAKE_DEVICES", 1); return 0; }
Result cuDeviceGet(int* out, int ordinal) { CALL; *out = ordinal; return 0; }
Result cuDeviceGetName(char* out, int len, int device) { CALL; snprintf(out, len, "Fake %d", device); return 0; }
Result cuDeviceTotalMem_v2(size_t* out, int device) { CALL; (void)device; *out = env("FAKE_MEMORY", 64 << 20); return 0; }
Result cuDeviceGetAttribute(int* out, int which, int device) {
    CALL;
    (void)device;
    long sm = env("FAKE_SM", 90);
    *out = which == 75 ? sm / 10 : which == 76 ? sm % 10 : which == 16 ? 4 : which == 97 ? 232448 : which == 38 ? 60 << 20 : which == 19 ? env("FAKE_MAPS", 1) : -1;
    return *out < 0;
}

/* The primary context: one, however often it is retained. */
Result cuDevicePrimaryCtxRetain(void** out, int device) {
    CALL;
    static void* one;
    (void)device;
    if (!contexts++) one = keep(malloc(1), 1, "context");
    *out = one;
    return 0;
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
    LOCK;
    (void)device;
    if (!contexts) return fprintf(stderr, "fake driver: no context\n"), INVALID_CONTEXT;
    if (--contexts) return 0;
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
        streams[i]->done = streams[i]->given;
    }
    return conflict ? CAPTURE_UNSUPPORTED : prohibited() ? CAPTURE_UNSUPPORTED : 0;
}
Result cuThreadExchangeStreamCaptureMode(int* m) { int old = mode; mode = *m; *m = old; return 0; }

Result cuStreamCreate(Stream** out, unsigned flags) {
    UNSAFE;
    if (flags > 1 || n_streams == 64) return INVALID_VALUE;
    Stream* s = calloc(1, sizeof *s);
    s->id = n_streams, s->blocking = !flags;
    streams[n_streams++] = s;
    *out = keep(s, 1, "stream");
    return 0;
}
Result cuStreamDestroy_v2(Stream* s) { IN_CONTEXT; if (s->capturing) fprintf(stderr, "fake driver: no stream to record any more\n"); streams[s->id] = 0; return drop(s, "stream", 0); }
Result cuStreamSynchronize(Stream* s) {
    IN_CONTEXT;
    if (legacy(s)) return CAPTURE_IMPLICIT;
    if ((uintptr_t)s <= 1) return INVALID_VALUE;
    if (s->capturing) return s->invalidated = 1, CAPTURE_UNSUPPORTED;
    if (prohibited()) return CAPTURE_UNSUPPORTED;
    s->done = s->given;
    return 0;
}
Result cuStreamWaitEvent(Stream* s, Event* e, unsigned flags) {
    ENQUEUE(s);
    if (!find((uint64_t)e, 1) || flags) return INVALID_VALUE;
    /* Captured work cannot depend on other work, nor other work on captured work. */
    if (s->capturing != e->captured) {
        if (s->capturing) s->invalidated = 1;
        if (e->captured && e->stream) e->stream->invalidated = 1;
        return CAPTURE_ISOLATION;
    }
    return 0;
}
Result cuEventCreate(Event** out, unsigned flags) {
    IN_CONTEXT;
    if (flags & ~3u) return INVALID_VALUE;
    Event* e = calloc(1, sizeof *e);
    e->flags = flags;
    ++*count(flags & 1 ? "events that sleep" : "events that spin");
    *out = keep(e, sizeof *e, "event");
    return 0;
}
Result cuEventDestroy_v2(Event* e) { IN_CONTEXT; return drop(e, "event", 0); }
Result cuEventRecord(Event* e, Stream* s) {
    ENQUEUE(s);
    if (!find((uint64_t)e, 1)) return INVALID_VALUE;
    e->stream = s, e->captured = s->capturing, e->number = s->given, e->at = now();
    return 0;
}
static Result event(Event* e) {
    if (!find((uint64_t)e, 1)) return INVALID_VALUE;
    if (e->captured) return e->stream->invalidated = 1, CAPTURED_EVENT;
    return 0;
}
Result cuEventQuery(Event* e) {
    UNSAFE;
    Result r = event(e);
    if (r || !e->stream || e->stream->done >= e->number) return r;
    e->stream->done += !env("FAKE_STUCK", 0);
    return NOT_READY;
}
Result cuEventSynchronize(Event* e) {
    UNSAFE;
    Result r = event(e);
    if (!r && e->stream && e->stream->done < e->number) e->stream->done = e->number;
    return r;
}
Result cuEventElapsedTime(float* ms, Event* from, Event* to) {
    UNSAFE;
    if (event(from) || event(to)) return INVALID_VALUE;
    if ((from->flags | to->flags) & 2) return 400;
    if (from->stream->done < from->number || to->stream->done < to->number) return NOT_READY;
    *ms = 1e3 * (to->at - from->at);
    return 0;
}

Result cuMemAlloc_v2(uint64_t* out, size_t bytes) {
    UNSAFE;
    if (used + bytes > (size_t)env("FAKE_MEMORY", 64 << 20)) return OUT_OF_MEMORY;
    used += bytes;
    *out = (uint64_t)keep(aligned_alloc(256, (bytes + 255) / 256 * 256), bytes, "memory");
    return 0;
}
/* Giving back may synchronise the whole context: no mode makes that safe beside a capture. */
#define GIVE_BACK                                                                       \
    UNSAFE;                                                                             \
    do {                                                                                \
        if (any_capture()) fprintf(stderr, "fake driver: %s beside a recording\n", __func__); \
    } while (0)
Result cuMemFree_v2(uint64_t at) {
    GIVE_BACK;
    size_t bytes = 0;
    Result r = drop((void*)at, "memory", &bytes);
    used -= bytes;
    if (!r) free((void*)at);
    return r;
}
Result cuMemGetInfo_v2(size_t* free_, size_t* total) { IN_CONTEXT; *total = env("FAKE_MEMORY", 64 << 20); *free_ = *total - used; return 0; }
Result cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
    UNSAFE;
    if ((flags & 2) && !env("FAKE_MAPS", 1)) return INVALID_VALUE;
    *out = keep(malloc(bytes), bytes, flags & 2 ? "mapped memory" : "pinned memory");
    return 0;
}
Result cuMemFreeHost(void* at) {
    GIVE_BACK;
    Node* n = find((uint64_t)at, 1);
    Result r = drop(at, n ? n->kind : "pinned memory", 0);
    if (!r) free(at);
    return r;
}
Result cuMemHostRegister_v2(void* at, size_t bytes, unsigned flags) {
    UNSAFE;
    if ((uintptr_t)at % 4096) return INVALID_VALUE;
    if ((flags & 2) && !env("FAKE_MAPS", 1)) return INVALID_VALUE;
    if (find((uint64_t)at, 1)) return ALREADY_REGISTERED;
    keep(at, bytes, flags & 2 ? "mapped memory" : "pinned memory");
    return 0;
}
Result cuMemHostUnregister(void* at) { GIVE_BACK; Node* n = find((uint64_t)at, 1); return drop(at, n ? n->kind : "registered memory", 0); }
Result cuMemHostGetDevicePointer_v2(uint64_t* out, void* at, unsigned flags) {
    IN_CONTEXT;
    Node* n = find((uint64_t)at, 1);
    if (!n || strcmp(n->kind, "mapped memory") || flags) return INVALID_VALUE;
    *out = (uint64_t)at;
    return 0;
}

/* A copy from or to pageable memory cannot be captured. */
static int pageable(const void* host, size_t n, Stream* s) {
    if (!s->capturing || find((uint64_t)host, n)) return 0;
    return s->invalidated = 1;
}
Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, Stream* s) {
    ENQUEUE(s);
    if (!find(to, n)) return INVALID_VALUE;
    if (pageable(from, n, s)) return CAPTURE_UNSUPPORTED;
    if (!s->capturing) memcpy((void*)to, from, n);
    return work(s, to, n, (uint64_t)from, n);
}
Result cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, Stream* s) {
    ENQUEUE(s);
    if (!find(from, n)) return INVALID_VALUE;
    if (pageable(to, n, s)) return CAPTURE_UNSUPPORTED;
    if (!s->capturing) memcpy(to, (void*)from, n);
    return work(s, from, n, (uint64_t)to, n);
}
Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, Stream* s) {
    ENQUEUE(s);
    if (!find(to, n) || !find(from, n)) return INVALID_VALUE;
    if (!s->capturing) memmove((void*)to, (void*)from, n);
    return work(s, to, n, from, n);
}
Result cuMemsetD8Async(uint64_t to, unsigned char v, size_t n, Stream* s) {
    ENQUEUE(s);
    if (!find(to, n)) return INVALID_VALUE;
    if (!s->capturing) memset((void*)to, v, n);
    return work(s, to, n, 0, 0);
}

/* Loading while this thread captures: the driver can be talked into it, and compiles in the middle of a step. */
static void loads(void) {
    for (int i = 0; i < n_streams; i++)
        if (streams[i] && streams[i]->capturing && pthread_equal(streams[i]->owner, pthread_self())) ++*count("loads in a recording");
}
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
    loads();
    return memcmp(image, "\177ELF", 4) ? load_ptx(out, image) : load_code(out, image);
}
Result cuModuleUnload(void* m) { GIVE_BACK; Result r = drop(m, "module", 0); if (!r) free(m); return r; }
Result cuModuleGetFunction(void** out, void* m, const char* name) { UNSAFE; loads(); Module* of = m; *out = memmem(of->names, of->bytes, name, strlen(name)); return *out ? 0 : 500; }
/* Registers, and 16 bytes of local and 8 of shared memory. */
Result cuFuncGetAttribute(int* out, int which, void* f) { IN_CONTEXT; *out = which == 4 ? env("FAKE_REGISTERS", 168) : which == 3 ? 16 : which == 1 ? 8 : -1; return !f || *out < 0; }
Result cuFuncSetAttribute(void* f, int which, int value) { IN_CONTEXT; return !f || which != 8 || value > 232448; }
Result cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream* s,
                      void** params, void** extra) {
    ENQUEUE(s);
    (void)shared;
    if (!f || !params || extra || !gx || !gy || !gz || !bx || !by || !bz) return INVALID_VALUE;
    if (!s->capturing) launched++;
    return work(s, 0, 0, 0, 0);
}

Result cuStreamBeginCapture_v2(Stream* s, int m) {
    ENQUEUE(s);
    if (s->capturing || m < GLOBAL || m > RELAXED) return INVALID_VALUE;
    s->capturing = 1, s->mode = m, s->recorded = 0, s->owner = pthread_self();
    return 0;
}
Result cuStreamEndCapture(Stream* s, void** out) {
    LOCK;
    if (!current) return INVALID_CONTEXT;
    if (!s || !s->capturing) return 401;
    if (s->mode != RELAXED && !pthread_equal(s->owner, pthread_self())) return CAPTURE_WRONG_THREAD;
    /* However it ends, the stream leaves capture. */
    int invalid = s->invalidated;
    s->capturing = s->invalidated = 0;
    *out = 0;
    Result r = begin(__func__);
    if (r || invalid) return r ? r : CAPTURE_INVALIDATED;
    int* n = malloc(sizeof *n);
    *n = s->recorded;
    *out = keep(n, sizeof *n, "graph");
    return 0;
}
Result cuGraphDestroy(void* g) { LOCK; return drop(g, "graph", 0); }
Result cuGraphInstantiateWithFlags(void** out, int* g, unsigned long long flags) {
    UNSAFE;
    if (!g || flags) return INVALID_VALUE;
    int* n = malloc(sizeof *n);
    *n = *g;
    *out = keep(n, sizeof *n, "executable graph");
    return 0;
}
Result cuGraphExecDestroy(void* g) { GIVE_BACK; return drop(g, "executable graph", 0); }
Result cuGraphLaunch(int* g, Stream* s) { ENQUEUE(s); launched += *g; return work(s, 0, 0, 0, 0); }
Result cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, void* base, const uint64_t* size, const uint64_t* strides, const unsigned* box,
                              const unsigned* steps, int interleave, int swizzle, int l2, int fill) {
    IN_CONTEXT;
    if ((uint64_t)map % 64 || (uint64_t)base % 16 || strides[0] % 16 || box[0] > 256 || box[1] > 256 || box[0] * 2 > 128 || rank != 2) return 1;
    uint64_t words[16] = {(uint64_t)base, size[0], size[1], strides[0], box[0], box[1], steps[0], steps[1], type, interleave, swizzle, l2, fill};
    memcpy(map, words, sizeof words);
    return 0;
}
