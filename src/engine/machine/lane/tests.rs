//! Order, failures and the end of jobs.

use super::*;
use crate::device::emulated::{EmulatedOptions, EmulatedRuntime, Speed};
use crate::device::{Buffer, Lane as DeviceLane};

fn runtime() -> Arc<dyn Runtime> {
    // A copy of 4 KB takes 200 ms.
    let speed = Speed { host_to_device: Some(2e-5), ..Speed::default() };
    Arc::new(EmulatedRuntime::new(EmulatedOptions { speed, ..Default::default() }).unwrap())
}

fn lane(runtime: &Arc<dyn Runtime>) -> Lane<Vec<usize>> {
    let (started, ()) = Started::new(|| ()).unwrap();
    started.serve(Vec::new(), runtime.clone(), None)
}

fn note(op: usize, events: Vec<Event>, after: Vec<Ticket>) -> HostJob<Vec<usize>> {
    let work = move |seen: &mut Vec<usize>| {
        seen.push(op);
        Ok(())
    };
    HostJob {
        op,
        events,
        after,
        seconds: 0.0,
        attends: false,
        detached: None,
        program: None,
        work: Box::new(work),
    }
}

#[test]
fn the_oldest_job_that_is_ready_runs_first() {
    let runtime = runtime();
    let buffer = Buffer::new(&runtime, 4096).unwrap();
    let mut lane = lane(&runtime);
    runtime.upload(DeviceLane::HostToDevice, buffer.ptr(), &[1; 4096]).unwrap();
    let copied = runtime.record(DeviceLane::HostToDevice).unwrap();
    // The first job waits for the copy, the second for the first, the others for nothing or for each other.
    let first = lane.give(note(0, vec![copied.clone()], vec![]));
    let second = lane.give(note(1, vec![], vec![first]));
    let third = lane.give(note(2, vec![], vec![]));
    let fourth = lane.give(note(3, vec![], vec![third]));
    lane.wait(fourth).unwrap();
    assert_eq!(*lane.state(), [2, 3]);
    assert!(!lane.is_idle() && !runtime.is_done(&copied).unwrap(), "the copy takes longer");
    lane.wait(second).unwrap();
    assert!(lane.is_idle());
    let ran: Vec<usize> = lane.finish().unwrap().iter().map(|r| r.op).collect();
    assert_eq!((ran, &*lane.state()), (vec![2, 3, 0, 1], &vec![2, 3, 0, 1]));
}

/// A lane that waits long for the device leaves its core to others: it looks, sleeps, and looks again.
#[test]
fn a_long_wait_for_the_device_is_slept_through() {
    /// Seconds of this thread on a core.
    fn seconds_on_a_core() -> f64 {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the clock of the calling thread, into a value that outlives the call.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) }, 0);
        t.tv_sec as f64 + 1e-9 * t.tv_nsec as f64
    }
    let runtime = runtime();
    let buffer = Buffer::new(&runtime, 4096).unwrap();
    let (told, times) = mpsc::channel();
    let mut lane = lane(&runtime);
    let clock = |events| {
        let told = told.clone();
        let work = move |_: &mut Vec<usize>| {
            told.send((seconds_on_a_core(), Instant::now())).map_err(|e| Error::Run(e.to_string()))
        };
        HostJob { work: Box::new(work), ..note(0, events, vec![]) }
    };
    lane.give(clock(vec![]));
    let before = times.recv().unwrap();
    runtime.upload(DeviceLane::HostToDevice, buffer.ptr(), &[1; 4096]).unwrap();
    let copied = runtime.record(DeviceLane::HostToDevice).unwrap();
    let job = lane.give(clock(vec![copied]));
    lane.wait(job).unwrap();
    let after = times.recv().unwrap();
    let (busy, waited) = (after.0 - before.0, (after.1 - before.1).as_secs_f64());
    assert!(waited > 0.15, "{waited} s");
    assert!(busy < 0.4 * waited, "{busy} s on a core in {waited} s of waiting");
}

#[test]
fn a_job_that_fails_or_panics_ends_the_step_and_not_the_lane() {
    let runtime = runtime();
    let mut lane = lane(&runtime);
    for panics in [false, true, false, true] {
        let fails = move |_: &mut Vec<usize>| match panics {
            true => panic!("row {} of nothing", 7),
            false => Err(Error::Run("no luck".into())),
        };
        let ok = lane.give(note(0, vec![], vec![]));
        let bad = lane.give(HostJob {
            op: 1,
            events: vec![],
            after: vec![ok],
            seconds: 0.0,
            attends: false,
            detached: None,
            program: None,
            work: Box::new(fails),
        });
        let dropped = lane.give(note(2, vec![], vec![bad]));
        let error = lane.wait(dropped).unwrap_err().to_string();
        assert!(error.contains(if panics { "panicked: row 7 of nothing" } else { "no luck" }), "{error}");
        let late = lane.give(note(3, vec![], vec![]));
        lane.wait(late).expect_err("the step is over");
        lane.finish().expect("somebody was told");
        assert_eq!(std::mem::take(&mut *lane.state()), [0]);
    }
    // Nothing waits for the job, so its error is reported at the end.
    lane.give(HostJob {
        op: 0,
        events: vec![],
        after: vec![],
        seconds: 0.0,
        attends: false,
        detached: None,
        program: None,
        work: Box::new(|_| Err(Error::Run("late".into()))),
    });
    assert!(lane.finish().unwrap_err().to_string().contains("late"));
    let job = lane.give(note(5, vec![], vec![]));
    lane.wait(job).unwrap();
    lane.finish().unwrap();
    assert_eq!(*lane.state(), [5]);
}

#[test]
fn what_is_cancelled_does_not_run() {
    let runtime = runtime();
    let buffer = Buffer::new(&runtime, 4096).unwrap();
    let mut lane = lane(&runtime);
    runtime.upload(DeviceLane::HostToDevice, buffer.ptr(), &[1; 4096]).unwrap();
    let copied = runtime.record(DeviceLane::HostToDevice).unwrap();
    lane.give(note(0, vec![copied], vec![]));
    lane.cancel();
    assert!(lane.finish().unwrap().is_empty() && lane.state().is_empty());
    drop(lane);
    runtime.synchronize_all().unwrap();
}

#[test]
fn an_event_of_a_lost_device_fails_the_step() {
    use crate::device::emulated::FaultPlan;
    let emulated = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
    let runtime: Arc<dyn Runtime> = emulated.clone();
    let buffer = Buffer::new(&runtime, 4096).unwrap();
    let mut lane = lane(&runtime);
    emulated.set_faults(FaultPlan { lost_at: Some(1), ..Default::default() });
    runtime.upload(DeviceLane::HostToDevice, buffer.ptr(), &[1; 4096]).unwrap();
    if let Ok(copied) = runtime.record(DeviceLane::HostToDevice) {
        let job = lane.give(note(0, vec![copied], vec![]));
        let error = lane.wait(job).unwrap_err();
        assert!(matches!(error, Error::Device { .. }), "{error}");
    }
    lane.finish().ok();
    let job = lane.give(note(1, vec![], vec![]));
    lane.wait(job).unwrap();
    assert_eq!(*lane.state(), [1]);
}

#[test]
fn many_steps_of_short_jobs() {
    let runtime = runtime();
    let mut lane = lane(&runtime);
    for step in 0..500 {
        let jobs: Vec<Ticket> =
            (0..7).map(|op| lane.give(note(op, vec![], op.checked_sub(1).into_iter().collect()))).collect();
        lane.wait(jobs[step % 7]).unwrap();
        if step % 100 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(lane.finish().unwrap().len(), 7);
    }
    assert_eq!(lane.state().len(), 3500);
}

/// Threads begin on the cores of their parent, which a pool may have pinned: on an H200's host of 16 cores the two alternated on one, and
/// a hand-over inside a step took 8 ms.
#[test]
fn a_lane_started_by_a_pinned_thread_has_all_cores() {
    let cores = || core_affinity::get_core_ids().unwrap_or_default();
    let all = cores();
    if all.len() < 2 {
        println!("skipped: one core only");
        return;
    }
    let seen = std::thread::spawn(move || {
        // The pool's cores are those of the process, as it first asked for them.
        crate::host::allowed_cores();
        core_affinity::set_for_current(all[0]);
        let (_, seen) = Started::<()>::new(move || cores().len()).unwrap();
        (seen, all.len())
    });
    let (seen, all) = seen.join().unwrap();
    assert_eq!(seen, all);
}
