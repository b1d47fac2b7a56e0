use super::*;
use crate::hardware;
use Lane::{Compute, DeviceToHost, HostToDevice};

fn clock() -> Clock {
    Clock::new(Rates::of(&hardware::named("t4-xeon").unwrap()).unwrap())
}

fn span(m: &Moment) -> (f64, f64) {
    m.span().expect("a time that is known")
}

#[test]
fn lanes_run_beside_each_other_and_events_order_them() {
    let c = clock();
    let copy = c.enqueue(HostToDevice, 4.0);
    let before = c.enqueue(Compute, 3.0);
    c.wait(Compute, &c.record(HostToDevice));
    let after = c.enqueue(Compute, 2.0);
    let end = c.record(Compute);
    c.reach(&end);
    assert_eq!((span(&copy), span(&before), span(&after)), ((0.0, 4.0), (0.0, 3.0), (4.0, 6.0)));
    assert_eq!(c.now(), 6.0);
    // It is issued now, so it cannot begin earlier.
    let late = c.enqueue(DeviceToHost, 1.0);
    c.reach(&late);
    assert_eq!((span(&late), c.now()), ((6.0, 7.0), 7.0));
    // Reaching a moment in the past does not turn the clock back.
    c.reach(&copy);
    assert_eq!(c.now(), 7.0);
}

#[test]
fn the_host_takes_the_oldest_operation_that_is_ready() {
    let c = clock();
    let slow = c.enqueue(Compute, 10.0);
    let waits = c.host(1.0, vec![slow], true, false);
    let first = c.host(3.0, vec![], true, false);
    let second = c.host(3.0, vec![], true, false);
    let behind = c.host(2.0, vec![first.clone()], true, false);
    c.reach(&waits);
    assert_eq!((span(&first), span(&second)), ((0.0, 3.0), (3.0, 6.0)));
    assert_eq!((span(&behind), span(&waits)), ((6.0, 8.0), (10.0, 11.0)));
}

/// The host chooses among the operations that can have been issued by then, and not before these are known.
#[test]
fn what_is_issued_in_time_is_considered() {
    let c = clock();
    let device = c.enqueue(Compute, 10.0);
    let short = c.enqueue(HostToDevice, 4.0);
    let old = c.host(5.0, vec![device], true, false);
    assert!(!c.is_past(&old));
    c.reach(&short);
    // The host is idle until 10, so this operation begins at 4.
    let young = c.host(7.0, vec![], true, false);
    c.reach(&old);
    assert_eq!((span(&young), span(&old)), ((4.0, 11.0), (11.0, 16.0)));
}

#[test]
fn asking_goes_on_until_it_is_past() {
    let c = clock();
    let work = c.enqueue(Compute, 10e-6);
    let asked = (0..).take_while(|_| !c.is_past(&work)).count();
    assert!((10..=11).contains(&asked), "{asked} times, a microsecond each");
    assert!(c.now() >= span(&work).1);
}

#[test]
fn waits_of_other_threads_are_not_the_control_threads() {
    let c = clock();
    let work = c.enqueue(Compute, 5.0);
    std::thread::scope(|s| {
        let wait = || {
            uncount_waits();
            c.reach(&work);
            assert!(!counts());
        };
        s.spawn(wait).join().unwrap();
    });
    assert_eq!(c.now(), 0.0);
    c.spend(2.0);
    let next = c.enqueue(HostToDevice, 1.0);
    c.reach(&next);
    assert_eq!(span(&next), (2.0, 3.0));
}

/// The device waits for the host, which waits for the device, as in a decode step on two sides.
#[test]
fn hand_overs_add_up() {
    let c = clock();
    let mut host = c.host(1.0, vec![], true, false);
    for _ in 0..3 {
        c.wait(HostToDevice, &host);
        c.enqueue(HostToDevice, 0.5);
        c.wait(Compute, &c.record(HostToDevice));
        let done = c.enqueue(Compute, 2.0);
        host = c.host(1.0, vec![done], true, false);
    }
    c.reach(&host);
    assert_eq!(c.now(), 1.0 + 3.0 * 3.5);
}

#[test]
fn a_machine_without_a_gpu_is_refused() {
    let mut cpu = hardware::named("t4-xeon").unwrap();
    cpu.accelerator = None;
    let said = Rates::of(&cpu).unwrap_err().to_string();
    assert!(said.contains("emulated:t4-xeon") && said.contains("no [gpu]"), "{said}");
    let rates = *clock().rates();
    let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * b;
    assert!(close(rates.upload(12_500_000_000), 1.0 + 5e-6) && rates.download(0) == 0.0);
    assert!(close(rates.device.seconds(Work { flops: 0, bytes: 272_000_000_000 }), 1.0));
    assert!(close(rates.host.seconds(Work { flops: 3_120_000_000_000, bytes: 1 }), 1.0));
}
