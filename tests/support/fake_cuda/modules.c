/* modules.c    modules, their kernels, and launches */
#include "fake.h"

/* A module: its names, copied, and the bytes of them, which it takes of the device's memory as long as it is loaded. */
typedef struct Module {
    size_t bytes;
    Function* functions;
    char names[];
} Module;

static size_t code;
static Result load(void** out, const char* image, size_t bytes) {
    Result r = charge(granules(code + bytes) - granules(code));
    if (r) return r;
    code += bytes;
    Module* m = malloc(sizeof *m + bytes + 1);
    m->bytes = bytes, m->functions = 0;
    memcpy(m->names, image, bytes);
    m->names[bytes] = 0;
    *out = keep(m, 1, "module");
    return 0;
}
/* Loading while this thread captures: the driver can be talked into it, and compiles in the middle of a step. */
static void loads(void) {
    for (int i = 0; i < n_streams; i++)
        if (streams[i] && streams[i]->capturing && pthread_equal(streams[i]->owner, pthread_self())) ++*count("loads in a recording");
}
/* What a driver of FAKE_VERSION on a device of FAKE_SM does with machine code (ELF: ABI 7 of CUDA 12's assemblers, 8 of 13's)
 * and with PTX. */
static Result load_code(void** out, const char* elf) {
    const unsigned char* e = (const unsigned char*)elf;
    uint64_t sections; uint32_t flags; uint16_t size, n;
    memcpy(&sections, e + 40, 8), memcpy(&flags, e + 48, 4), memcpy(&size, e + 58, 2), memcpy(&n, e + 60, 2);
    int newer = e[8] >= 8, has = env("FAKE_SM", 90);
    int sm = newer ? flags >> 8 & 0xff : flags & 0xff;
    if (newer && env("FAKE_VERSION", 13000) < 13000) return 200;
    if (sm / 10 != has / 10 || sm > has) return 209;
    fprintf(stderr, "fake driver: loads machine code for %d\n", sm);
    return load(out, elf, sections + (uint64_t)size * n);
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
    return load(out, ptx, strlen(ptx));
}
Result cuModuleLoadDataEx(void** out, const char* image, unsigned n, int* options, void** values) {
    for (unsigned i = 0; i < n; i++)
        if (options[i] == 5) strcpy(values[i], "ptxas fatal : line 7: a fake complaint\n");
    UNSAFE;
    loads();
    return memcmp(image, "\177ELF", 4) ? load_ptx(out, image) : load_code(out, image);
}
Result cuModuleUnload(Module* m) {
    GIVE_BACK;
    Result r = drop(m, "module", 0);
    if (r) return r;
    discharge(granules(code) - granules(code - m->bytes));
    code -= m->bytes;
    for (Function *f = m->functions, *next; f; f = next) next = f->next, free(f);
    free(m);
    return 0;
}
Result cuModuleGetFunction(Function** out, Module* m, const char* name) {
    UNSAFE;
    loads();
    if (!memmem(m->names, m->bytes, name, strlen(name))) return 500;
    for (*out = m->functions; *out && strcmp((*out)->name, name); *out = (*out)->next) {}
    if (*out) return 0;
    Function* f = *out = malloc(sizeof *f + strlen(name) + 1);
    f->shared = 48 << 10, f->next = m->functions;
    strcpy(f->name, name);
    m->functions = f;
    return 0;
}
/* Registers, and 16 bytes of local and 8 of shared memory. */
Result cuFuncGetAttribute(int* out, int which, Function* f) { IN_CONTEXT; *out = which == 4 ? env("FAKE_REGISTERS", 168) : which == 3 ? 16 : which == 1 ? 8 : -1; return !f || *out < 0; }
Result cuFuncSetAttribute(Function* f, int which, int value) {
    IN_CONTEXT;
    if (!f || which != 8 || value > 232448) return INVALID_VALUE;
    f->shared = value;
    return 0;
}

Result cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream* s,
                      void** params, void** extra) {
    ENQUEUE(s);
    if (!f || !params || extra || !gx || !gy || !gz || !bx || !by || !bz || shared > f->shared) return INVALID_VALUE;
    if (!s->capturing) launched++;
    if (s->urgent) {
        int *most = count("most blocks of an urgent launch"), blocks = gx * gy * gz;
        ++*count("urgent launches");
        if (blocks > *most) *most = blocks;
    }
    Work w = {.kind = KERNEL, .function = f, .grid = {gx, gy, gz}, .block = {bx, by, bz}, .shared = shared, .params = params_of(f->name)};
    w.staged = malloc(w.params + 1);
    memcpy(w.staged, params[0], w.params);
    return enqueue(s, &w);
}

Result cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, void* base, const uint64_t* size, const uint64_t* strides, const unsigned* box,
                              const unsigned* steps, int interleave, int swizzle, int l2, int fill) {
    IN_CONTEXT;
    if ((uint64_t)map % 64 || (uint64_t)base % 16 || strides[0] % 16 || box[0] > 256 || box[1] > 256 || box[0] * 2 > 128 || rank != 2) return 1;
    if (executes()) return encode_map(map, base, size, strides[0], box);
    uint64_t words[16] = {(uint64_t)base, size[0], size[1], strides[0], box[0], box[1], steps[0], steps[1], type, interleave, swizzle, l2, fill};
    memcpy(map, words, sizeof words);
    return 0;
}
