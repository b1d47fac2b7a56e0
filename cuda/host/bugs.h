// bugs.h    parameters of bugs.cu (not part of abi.h: no GPU runs them)
#pragma once

struct BugParams {
    u32* out;
    const u32* in;
    u32* scratch; // as `out`, never written by the host
    u32* counter; // one word, 0
    u32 n;
    u32 shared_words;
    TensorMap map; // of sm_90a kernels: [128][64 * n] halves
};
