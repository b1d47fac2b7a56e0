//! Bytes as a trace of requests: a header and rows, each a request or bad by itself, or one error. With a limit, a beginning of that.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem::workload::{Arrival, MOST_TOKENS, TraceFile};

fuzz_target!(|data: &[u8]| {
    let read = |limit| TraceFile::read("fuzz", data, limit, |_| ());
    let Ok(trace) = read(None) else {
        // A header that is wrong is so for one row, too; and rows come after it.
        return drop(read(Some(1)));
    };
    let makes_sense = |r: &Arrival| {
        (1..=MOST_TOKENS).contains(&r.input)
            && (1..=MOST_TOKENS).contains(&r.output)
            && r.at.is_finite()
            && (r.at == 0.0 || trace.timed)
    };
    assert!(trace.requests.iter().all(makes_sense), "{trace:?}");
    assert!(trace.requests[0].at == 0.0 && trace.requests.is_sorted_by_key(|r| r.at), "{trace:?}");
    let lines = data.iter().filter(|&&b| b == b'\n').count() + 1;
    // Rows of JSON begin on the first line, those of CSV behind the header.
    let json = data.strip_prefix(b"\xef\xbb\xbf").unwrap_or(data).trim_ascii_start().starts_with(b"{");
    let header = usize::from(!json);
    assert!(trace.requests.len() + trace.bad_rows + header <= lines, "{} lines: {trace:?}", lines);
    assert!(
        trace.bad.len() <= trace.bad_rows && trace.bad.iter().all(|b| b.line > header as u64),
        "{trace:?}"
    );
    let n = trace.requests.len() + trace.bad_rows;
    if let Ok(half) = read(Some(n.div_ceil(2))) {
        assert_eq!(half.requests.len() + half.bad_rows, n.div_ceil(2));
    }
    assert_eq!(read(Some(n)).expect("all of it"), trace);
});
