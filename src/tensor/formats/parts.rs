//! What several block formats share: nibbles, high bits, the 6-bit scales of K-quants.

/// Eight bytes, as codes are handled: the same bits of each byte are shifted and masked at once.
#[inline(always)]
fn eight(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"))
}

/// The lowest bit of each of eight bytes.
const ONES: u64 = 0x0101_0101_0101_0101;

/// 32 codes from eight at a time.
#[inline(always)]
fn codes(eight: impl Fn(usize) -> u64) -> [u8; 32] {
    let mut codes = [0; 32];
    for i in 0..4 {
        codes[8 * i..8 * i + 8].copy_from_slice(&eight(i).to_le_bytes());
    }
    codes
}

/// `COUNT` bits from bit `at` on of each of 32 bytes.
#[inline(always)]
pub(super) fn bits<const COUNT: usize>(bytes: &[u8], at: usize) -> [u8; 32] {
    codes(|i| eight(&bytes[8 * i..]) >> at & (ONES * ((1 << COUNT) - 1)))
}

/// 32 codes of four bits: the first half in the low nibbles of 16 bytes, the second half in the high ones.
#[inline(always)]
pub(super) fn nibbles(bytes: &[u8]) -> [u8; 32] {
    codes(|i| eight(&bytes[i % 2 * 8..]) >> (i / 2 * 4) & (ONES * 15))
}

/// Signed bytes as bytes that are 128 larger, or the reverse.
#[inline(always)]
pub(super) fn flipped(bytes: &[u8]) -> [u8; 32] {
    codes(|i| eight(&bytes[8 * i..]) ^ (ONES << 7))
}

/// Adds bits from bit `AT` of each code on.
#[inline(always)]
pub(super) fn with_high<const AT: usize>(low: [u8; 32], high: [u8; 32]) -> [u8; 32] {
    codes(|i| eight(&low[8 * i..]) | eight(&high[8 * i..]) << AT)
}

/// Bit `i` of four bytes as code `i`.
#[inline(always)]
pub(super) fn spread(bits: &[u8]) -> [u8; 32] {
    // Byte j keeps bit j, and what is added carries it to the byte's top.
    let kept = |i: usize| (u64::from(bits[i]) * ONES) & 0x8040_2010_0804_0201;
    codes(|i| (kept(i) + 0x0040_6070_787c_7e7f) >> 7 & ONES)
}

/// The inverse of [`nibbles`], of the low four bits of codes.
pub(super) fn put_nibbles(codes: &[u8; 32], bytes: &mut [u8]) {
    for i in 0..16 {
        bytes[i] = (codes[i] & 15) | (codes[i + 16] & 15) << 4;
    }
}

/// The inverse of [`spread`], of the fifth bits of codes.
pub(super) fn put_fifth_bits(codes: &[u8; 32], bits: &mut [u8]) {
    for (codes, b) in codes.chunks_exact(8).zip(bits) {
        *b = codes.iter().enumerate().fold(0, |b, (i, c)| b | (c >> 4 & 1) << i);
    }
}

/// The inverse of [`bits`], of the bits of codes from bit `from` on.
pub(super) fn put_bits<const COUNT: usize>(codes: &[u8; 32], from: usize, bytes: &mut [u8], at: usize) {
    let mask = (1 << COUNT) - 1;
    for (b, c) in bytes.iter_mut().zip(codes) {
        *b = *b & !(mask << at) | (c >> from & mask) << at;
    }
}

/// The eight scales and minima of six bits in the 12 bytes of Q4_K and Q5_K: 0..4 in the low six bits of bytes j and
/// j + 4; 4..8 in a nibble of byte j + 4 and the top two bits of the others.
#[inline(always)]
pub(super) fn sub_scales(b: &[u8]) -> ([u8; 16], [u8; 16]) {
    let (mut scales, mut mins) = ([0; 16], [0; 16]);
    for j in 0..4 {
        (scales[j], mins[j]) = (b[j] & 63, b[j + 4] & 63);
        scales[j + 4] = (b[j + 8] & 15) | (b[j] >> 6) << 4;
        mins[j + 4] = (b[j + 8] >> 4) | (b[j + 4] >> 6) << 4;
    }
    (scales, mins)
}

/// The inverse of [`sub_scales`].
pub(super) fn put_sub_scales(scales: &[u8; 16], mins: &[u8; 16], b: &mut [u8]) {
    for j in 0..4 {
        b[j] = scales[j] | (scales[j + 4] >> 4) << 6;
        b[j + 4] = mins[j] | (mins[j + 4] >> 4) << 6;
        b[j + 8] = (scales[j + 4] & 15) | (mins[j + 4] & 15) << 4;
    }
}
