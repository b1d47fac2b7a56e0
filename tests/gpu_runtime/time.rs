//! Time: what events keep of it, and waits that end with it.

use std::time::{Duration, Instant};

use tandem::device::emulated::{EmulatedOptions, Speed};
use tandem::device::{Buffer, Lane, Runtime};

use super::{each, emulated, options};

#[test]
fn timed_events_keep_the_devices_time() {
    each(|name, rt| {
        let n = 256 << 10;
        let b = Buffer::new(&rt, n).unwrap();
        let begin = Instant::now();
        let before = rt.record_timed(Lane::Compute).unwrap();
        rt.fill(Lane::Compute, b.ptr(), 1, n).unwrap();
        let after = rt.record_timed(Lane::Compute).unwrap();
        rt.synchronize(&after).unwrap();
        let took = rt.elapsed(&before, &after).unwrap();
        assert!(took <= begin.elapsed(), "{name}: {took:?}");
        assert_eq!(rt.elapsed(&after, &after).unwrap(), Duration::ZERO, "{name}");
        // Not of events that keep none.
        let untimed = rt.record(Lane::Compute).unwrap();
        rt.synchronize(&untimed).unwrap();
        let refused = rt.elapsed(&before, &untimed).unwrap_err().to_string();
        assert!(refused.contains("keep"), "{name}: {refused}");
    });
}

/// 100 kB at 10 MB/s take 10 ms, on whichever lane the two ends are recorded.
#[test]
fn elapsed_time_is_that_of_the_work_between() {
    let speed = Speed { host_to_device: Some(0.01), ..Speed::default() };
    let rt = emulated(EmulatedOptions { speed, ..options() });
    let ptr = rt.alloc(100_000).unwrap();
    let before = rt.record_timed(Lane::Compute).unwrap();
    rt.wait(Lane::HostToDevice, &before).unwrap();
    rt.upload(Lane::HostToDevice, ptr, &[0; 100_000]).unwrap();
    let after = rt.record_timed(Lane::HostToDevice).unwrap();
    let early = rt.elapsed(&before, &after).unwrap_err().to_string();
    assert!(early.contains("not both done"), "{early}");
    rt.synchronize(&after).unwrap();
    let took = rt.elapsed(&before, &after).unwrap();
    assert!(took >= Duration::from_millis(10), "{took:?}");
    assert_eq!(rt.elapsed(&after, &before).unwrap(), Duration::ZERO, "backwards");
}

#[test]
fn a_wait_with_a_deadline_ends_with_either() {
    each(|name, rt| {
        let event = rt.record(Lane::DeviceToHost).unwrap();
        let later = Instant::now() + Duration::from_secs(60);
        assert!(rt.synchronize_until(&event, later).unwrap(), "{name}");
        // What is done is done, also when asked too late.
        assert!(rt.synchronize_until(&event, Instant::now()).unwrap(), "{name}");
        rt.spin_until_done(&event).unwrap();
    });
    // Work that takes 200 ms, and somebody who waits for 20.
    let speed = Speed { host_to_device: Some(0.0005), ..Speed::default() };
    let rt = emulated(EmulatedOptions { speed, ..options() });
    let ptr = rt.alloc(100_000).unwrap();
    let begin = Instant::now();
    rt.upload(Lane::HostToDevice, ptr, &[0; 100_000]).unwrap();
    let event = rt.record(Lane::HostToDevice).unwrap();
    assert!(!rt.synchronize_until(&event, begin + Duration::from_millis(20)).unwrap());
    assert!(
        (Duration::from_millis(20)..Duration::from_millis(200)).contains(&begin.elapsed()),
        "it ended in time"
    );
    assert!(rt.synchronize_until(&event, begin + Duration::from_secs(60)).unwrap());
    assert!(begin.elapsed() >= Duration::from_millis(200));
}
