//! MKL as a peer in this process, loaded at run time: `pip install mkl` and the folder of libmkl_rt in LD_LIBRARY_PATH
//! (libmkl_rt.so.3 in the wheels of 2026, .so.2 before).

use std::ffi::{CStr, c_int, c_void};

type GemmBf16 = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    f32,
    *const u16,
    c_int,
    *const u16,
    c_int,
    f32,
    *mut f32,
    c_int,
);

/// Its bf16 product.
pub struct Mkl {
    gemm: GemmBf16,
}

impl Mkl {
    /// Loads it for `threads` threads.
    ///
    /// # Errors
    /// What the loader says.
    pub fn load(threads: usize) -> Result<Mkl, String> {
        let open = |name: &CStr| {
            // SAFETY: a terminated name; libraries run their initialisers, as any that is linked.
            unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }
        };
        let library = [c"libmkl_rt.so.3", c"libmkl_rt.so.2", c"libmkl_rt.so"]
            .into_iter()
            .map(open)
            .find(|l| !l.is_null());
        let Some(library) = library else {
            // SAFETY: after a failure dlerror gives a terminated message, or null.
            let why = unsafe {
                let message = libc::dlerror();
                if message.is_null() { "no reason".into() } else { CStr::from_ptr(message).to_string_lossy() }
            };
            return Err(why.into_owned());
        };
        let symbol = |name: &CStr| -> Result<*mut c_void, String> {
            // SAFETY: an open library and a terminated name.
            let at = unsafe { libc::dlsym(library, name.as_ptr()) };
            if at.is_null() { Err(format!("no {}", name.to_string_lossy())) } else { Ok(at) }
        };
        let (gemm, set) = (symbol(c"cblas_gemm_bf16bf16f32")?, symbol(c"MKL_Set_Num_Threads")?);
        // SAFETY: mkl_cblas.h and mkl_service.h declare them so, with 32-bit integers (LP64, the default of mkl_rt).
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(set)(threads as c_int);
            Ok(Mkl { gemm: std::mem::transmute::<*mut c_void, GemmBf16>(gemm) })
        }
    }

    /// `out[m][n] = x[m][k] · w[n][k]ᵀ`.
    pub fn gemm_bf16(&self, [m, n, k]: [usize; 3], x: &[u16], w: &[u16], out: &mut [f32]) {
        assert!(x.len() >= m * k && w.len() >= n * k && out.len() >= m * n, "matrices of {m}, {n}, {k}");
        const ROW_MAJOR: c_int = 101;
        const PLAIN: c_int = 111;
        const TRANSPOSED: c_int = 112;
        let [mi, ni, ki] = [m, n, k].map(|v| v as c_int);
        // SAFETY: matrices of these sizes, checked above.
        unsafe {
            (self.gemm)(
                ROW_MAJOR,
                PLAIN,
                TRANSPOSED,
                mi,
                ni,
                ki,
                1.0,
                x.as_ptr(),
                ki,
                w.as_ptr(),
                ki,
                0.0,
                out.as_mut_ptr(),
                ni,
            );
        }
    }
}
