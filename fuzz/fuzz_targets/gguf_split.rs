//! Any bytes as the three files of a split model: the lengths of the first two (u32), then all of them.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tandem::model::formats::gguf::Gguf;
use tandem::tensor::Bytes;

fuzz_target!(|data: &[u8]| {
    let Some((lengths, rest)) = data.split_at_checked(8) else { return };
    let length = |at: usize| u32::from_le_bytes(lengths[at..at + 4].try_into().expect("4 bytes")) as usize;
    let (first, rest) = rest.split_at(length(0).min(rest.len()));
    let (second, third) = rest.split_at(length(4).min(rest.len()));
    let mut files = [first, second, third].into_iter();
    let mut read = |_: &Path| Ok(Bytes::copy_of(files.next().expect("at most the three of the name")));
    let Ok(whole) = Gguf::open_with(Path::new("m-00001-of-00003.gguf"), &mut read) else { return };
    for (name, t) in &whole.tensors {
        assert!(t.data.len() as u64 <= whole.files.bytes, "{name} is longer than its files");
    }
    assert!(whole.files.bytes <= data.len() as u64 && [1, 3].contains(&whole.files.count));
});
