//! The parameter structs of `cuda/include/abi.h`, by bindgen (`build/abi.rs`).
//!
//! Names, fields and constants are the header's. Device addresses are
//! [`DevPtr`](crate::device::runtime::DevPtr); every struct derives `Default` (zeroed), and those whose names
//! end in `Params` are [`Params`](crate::device::runtime::Params). Padding is a field (`__bindgen_padding_0`): write
//! `..Default::default()` for a struct that has padding.

mod generated {
    #![allow(
        missing_docs,
        non_camel_case_types,
        non_snake_case,
        non_upper_case_globals,
        dead_code,
        unused_imports
    )]
    #![allow(clippy::all, clippy::undocumented_unsafe_blocks)]
    include!(concat!(env!("OUT_DIR"), "/abi.rs"));
}

pub use generated::*;

#[cfg(test)]
mod tests {
    use super::*;

    /// bindgen's own layout tests are constants inside the generated file; this test guards the two types that its
    /// configuration replaces or aligns against drift.
    #[test]
    fn replaced_and_aligned_types() {
        assert_eq!(size_of::<TensorMap>(), 128);
        assert_eq!(align_of::<TensorMap>(), 128);
        // Inside a parameter struct they lie at multiples of their alignment, wherever the struct itself lies.
        assert_eq!(
            (std::mem::offset_of!(GemmTmaParams, w), std::mem::offset_of!(GemmTmaParams, x)),
            (0, 128)
        );
        assert_eq!(std::mem::offset_of!(PrefillAttentionTmaParams, kv) % 128, 0);
        assert_eq!(size_of::<crate::device::runtime::DevPtr>(), 8);
        assert_eq!(KV_PAGE_TOKENS, 32);
    }
}
