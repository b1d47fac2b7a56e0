//! What must be true of every decision, whatever happens.

use proptest::prelude::{Just, ProptestConfig, any, prop, prop_assert, prop_oneof, proptest};
use proptest::strategy::Strategy as Draw;
use tandem::sched::{self, Limits};

use super::driver::Driver;
use super::table::Table;

#[derive(Debug, Clone)]
enum Event {
    Submit { prompt: u32, more: u32 },
    Cancel(prop::sample::Index),
    Step,
}

fn event() -> impl Draw<Value = Event> {
    prop_oneof![
        3 => (1..200u32, 0..90u32).prop_map(|(prompt, more)| Event::Submit { prompt, more }),
        1 => any::<prop::sample::Index>().prop_map(Event::Cancel),
        6 => Just(Event::Step),
    ]
}

fn limits() -> impl Draw<Value = Limits> {
    (1..40u32, 1..4u32, 1..12u32, 0..24usize, 0..40usize)
        .prop_filter("some memory", |l| l.3 + l.4 > 0)
        .prop_map(|(rows, sub_batches, sequences, device_pages, host_pages)| Limits {
            rows,
            sub_batches,
            sequences,
            device_pages,
            host_pages,
        })
}

/// From a host that is much faster than the device to one that is a thousand times slower; nothing takes time in some.
fn table() -> impl Draw<Value = Table> {
    (
        1..5u32,
        0.0..4.0f64,
        1.0..64.0f64,
        0.0..0.1f64,
        prop_oneof![Just(0.0), Just(0.02), Just(100.0)],
        0.0..1.0f64,
    )
        .prop_map(|(layers, flat, ridge, device_token, times, launch)| Table {
            layers,
            flat,
            ridge,
            device_token,
            host_token: device_token * times,
            page: 0.01,
            launch,
        })
}

/// As many as `PROPTEST_CASES` says.
pub fn cases(usual: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(400), ..ProptestConfig::default() })]
    /// Each request in one queue, pages conserved, promises kept, no step without rows, groups that continue what is stored,
    /// and everybody gets there.
    #[test]
    fn any_requests_get_through_by_every_strategy(
        events in prop::collection::vec(event(), 0..120),
        limits in limits(),
        table in table(),
        name in prop::sample::select(sched::NAMES.to_vec()),
    ) {
        let mut driver = Driver::new(sched::by_name(name).unwrap(), limits, &table);
        let mut submitted = 0u64;
        let mut cancelled = 0;
        for event in events {
            match event {
                Event::Submit { prompt, more } => submitted += u64::from(driver.submit(prompt, prompt + more).is_some()),
                Event::Cancel(which) => {
                    let mut ids: Vec<_> = driver.live.keys().copied().collect();
                    ids.sort();
                    if !ids.is_empty() {
                        driver.cancel(ids[which.index(ids.len())]);
                        cancelled += 1;
                    }
                }
                Event::Step => driver.step().map_err(|e| proptest::test_runner::TestCaseError::fail(format!("{name}: {e}")))?,
            }
        }
        let mut left = 100_000;
        while !driver.live.is_empty() && left > 0 {
            driver.step().map_err(|e| proptest::test_runner::TestCaseError::fail(format!("{name}: {e}")))?;
            left -= 1;
        }
        prop_assert!(driver.live.is_empty(), "{name}: {} requests starve: {:?}", driver.live.len(), driver.queues);
        prop_assert!(driver.finished + cancelled == submitted);
    }
}
