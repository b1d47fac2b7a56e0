//! Descriptors for bulk tensor copies.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUtensorMap};

use super::context::Context;
use super::errors::device;
use crate::Result;
use crate::device::runtime::DevPtr;

/// The driver writes to a multiple of 64 bytes; CUDA 13's own type is aligned to 128, as kernels want it.
#[repr(C, align(128))]
struct Aligned(CUtensorMap);

/// See [`Runtime::tensor_map_2d`](crate::device::runtime::Runtime::tensor_map_2d).
pub(super) fn encode(
    context: &Context,
    base: DevPtr,
    [rows, cols, stride]: [u64; 3],
    [box_rows, box_cols]: [u32; 2],
) -> Result<[u8; 128]> {
    use sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    use sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    use sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE;
    use sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    use sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B;
    context.bind()?;
    let mut map = Aligned(CUtensorMap { opaque: [0; 16] });
    // Innermost dimension first. Elements are only moved, so any 2-byte type will do.
    let (size, strides, part, steps) = ([cols, rows], [stride * 2], [box_cols, box_rows], [1, 1]);
    // SAFETY: two dimensions, one stride, as the driver's signature has them; `map` outlives the call.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map.0,
            CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            base.0 as *mut c_void,
            size.as_ptr(),
            strides.as_ptr(),
            part.as_ptr(),
            steps.as_ptr(),
            CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    context.check(
        &format!("a tensor map of {rows} rows, {cols} of {stride} columns, boxes {box_rows} x {box_cols}"),
        code,
    )?;
    let mut bytes = [0; 128];
    for (to, word) in bytes.chunks_exact_mut(8).zip(map.0.opaque) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    Ok(bytes)
}

/// The error of devices without bulk tensor copies.
pub(super) fn unsupported(context: &Context, sm: u32) -> crate::Error {
    device(
        &context.name,
        format!("compute capability {}.{} has no bulk tensor copies (9.0 and later)", sm / 10, sm % 10),
    )
}
