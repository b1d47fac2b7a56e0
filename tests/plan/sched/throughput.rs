//! Strategies against each other over a clock: the shapes that the papers report.

use tandem::program::Flow;
use tandem::sched::{self, Decision, Limits, Predict, Queues, Strategy};

use super::driver::Driver;
use super::table::Table;

/// A machine with a model, and memory for keys and values, in tokens.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub table: Table,
    pub device_tokens: usize,
    pub host_tokens: usize,
}

impl Machine {
    fn limits(&self) -> Limits {
        Limits {
            rows: 512,
            sub_batches: 3,
            sequences: 4096,
            device_pages: self.device_tokens / 32,
            host_pages: self.host_tokens / 32,
        }
    }
}

/// A T4 with a model of 7 billion parameters of which hardly any keys and values fit: 13.5 GB of weights at 260 GB/s, 512 KiB
/// a token, a host with `c` of the device's rate.
pub fn t4(c: f64) -> Machine {
    let device_token = 524_288.0 / 260e9;
    Machine {
        table: Table {
            layers: 32,
            flat: 13.5e9 / 260e9,
            ridge: 125.0,
            device_token,
            host_token: device_token / c,
            page: 32.0 * 524_288.0 / 10e9,
            launch: 5e-5,
        },
        device_tokens: 4_000,
        host_tokens: 120_000,
    }
}

/// An A10 with a model of 8 billion parameters and grouped keys and values: 16 GB at 500 GB/s, 128 KiB a token.
pub fn a10(c: f64) -> Machine {
    let device_token = 131_072.0 / 500e9;
    Machine {
        table: Table {
            layers: 32,
            flat: 16e9 / 500e9,
            ridge: 125.0,
            device_token,
            host_token: device_token / c,
            page: 32.0 * 131_072.0 / 20e9,
            launch: 5e-5,
        },
        device_tokens: 36_000,
        host_tokens: 500_000,
    }
}

/// What a run comes to.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Tokens of answers in a second.
    pub rate: f64,
    /// Steps by flow.
    pub flows: [u64; 3],
    /// Tokens with keys and values on device and host.
    pub made: [u64; 2],
}

/// All of `n` requests are there from the beginning.
pub fn offline(name: &str, machine: &Machine, n: usize, prompt: u32, output: u32) -> Run {
    let mut driver = Driver::new(sched::by_name(name).unwrap(), machine.limits(), &machine.table);
    for i in 0..n as u32 {
        // Lengths vary by a quarter.
        let vary = |x: u32, salt: u32| x * (75 + (i * salt) % 51) / 100;
        let (prompt, output) = (vary(prompt, 37).max(1), vary(output, 23).max(1));
        driver.submit(prompt, prompt + output).unwrap();
    }
    while !driver.live.is_empty() {
        driver.step().unwrap();
        assert!(driver.steps < 1_000_000, "{name}: no end");
    }
    Run { rate: driver.tokens as f64 / driver.clock, flows: driver.flows, made: driver.made }
}

/// The issue of a run, told.
fn told(names: &[&str], runs: &[Run]) {
    for (name, run) in names.iter().zip(runs) {
        let Run { rate, flows, made } = run;
        println!("  {name:10} {rate:8.2} tok/s {:5.2}x  steps {flows:?} made {made:?}", rate / runs[0].rate);
    }
}

/// In decode-heavy work APEX is at least NEO and NEO at least the device alone; `auto` is never more than 2% below the best.
#[test]
fn auto_is_the_best_of_them_and_hybrids_beat_the_device_alone_where_its_memory_is_short() {
    let mut wrong = Vec::new();
    for (what, machine) in
        [("t4 0.1", t4(0.1)), ("t4 0.3", t4(0.3)), ("a10 0.05", a10(0.05)), ("a10 0.2", a10(0.2))]
    {
        for (prompt, output) in [(200, 100), (200, 400), (1000, 50), (1000, 300)] {
            let names = sched::NAMES;
            let runs = names.map(|name| offline(name, &machine, 150, prompt, output));
            let rate = |name: &str| runs[names.iter().position(|n| *n == name).unwrap()].rate;
            println!("{what} {prompt}/{output}");
            told(&names, &runs);
            let best = names.map(rate).into_iter().fold(0.0, f64::max);
            if rate("auto") < 0.98 * best {
                wrong.push(format!(
                    "{what} {prompt}/{output}: auto makes {:.1}, the best {best:.1}",
                    rate("auto")
                ));
            }
            // A fiftieth is for the order in which requests happen to end.
            let at_least = |a: &str, b: &str| rate(a) >= 0.98 * rate(b);
            if output >= 300 && !(at_least("apex", "neo") && at_least("neo", "gpu-only")) {
                wrong.push(format!("{what} {prompt}/{output}: {:?}", names.map(rate)));
            }
        }
    }
    // Where hardly any keys and values fit the device, most of what is made is the host's.
    let [alone, apex] = ["gpu-only", "apex"].map(|name| offline(name, &t4(0.3), 150, 200, 400));
    assert!(apex.rate > 1.84 * alone.rate && apex.made[1] > apex.made[0], "{apex:?} {alone:?}");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_short_memory_is_where_pipelining_pays_and_a_slow_host_where_overlap_does() {
    let flows = |machine: &Machine, output| offline("apex", machine, 150, 200, output).flows;
    let (t4, a10) = (flows(&t4(0.3), 300), flows(&a10(0.05), 400));
    assert!(t4[Flow::TwoLanes as usize] > 10 * t4[Flow::Async as usize], "{t4:?}");
    assert!(a10[Flow::Async as usize] > 10 * a10[Flow::TwoLanes as usize], "{a10:?}");
}

/// Does not tell its strategy what steps took.
struct Deaf(Box<dyn Strategy>);

impl Strategy for Deaf {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn plan(&mut self, queues: &Queues, limits: &Limits, costs: &dyn Predict) -> Decision {
        self.0.plan(queues, limits, costs)
    }
}

/// A host that is slower than its tables say: a cohort that lags is made smaller, until it advances in every step again. The host
/// works as much as before, and a request of it has its token that much sooner. Two cohorts, of half
/// the size, make as much of its time.
#[test]
fn cohorts_shrink_where_the_host_is_slower_than_predicted() {
    let machine = Machine { host_tokens: 2_000_000, ..a10(0.02) };
    let run = |strategy: Box<dyn Strategy>, slower: f64, cohorts: u32| {
        let truth = Table { host_token: slower * machine.table.host_token, ..machine.table };
        let limits = Limits { sub_batches: 1 + cohorts, ..machine.limits() };
        let mut driver = Driver::new(strategy, limits, &machine.table);
        driver.truth = &truth;
        for _ in 0..600 {
            driver.submit(1000, 3000).unwrap();
        }
        for _ in 0..6000 {
            driver.step().unwrap();
        }
        (driver.cohorts[1] as f64 / driver.cohorts[0] as f64, driver.made[1] as f64 / driver.clock)
    };
    let apex = || sched::by_name("apex").unwrap();
    let (ready, _) = run(apex(), 1.0, 1);
    let (learned, rate) = run(apex(), 1.6, 1);
    let (deaf, before) = run(Box::new(Deaf(apex())), 1.6, 1);
    println!(
        "ready {ready:.3}; slower host: {learned:.3} with {rate:.2} tok/s, {deaf:.3} with {before:.2} untold"
    );
    assert!(ready > 0.97, "{ready}");
    assert!(learned > 0.9 && deaf < 0.65, "{learned} {deaf}");
    assert!(rate > 0.97 * before, "{rate} {before}");
    let two = run(apex(), 1.6, 2).1;
    println!("host tokens a second with 1 and 2 cohorts: {rate:.2}, {two:.2}");
    assert!(two > 0.97 * rate, "{rate} {two}");
}
