//! Many requests, interleaved at random by every strategy, on this machine's GPU (or the stand-in for its driver): each token is one
//! that the model could say, no page is lost, and something moves on in every step.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::interleave::{Given, STRATEGIES, Script, Tally, Watchdog, World};
use crate::support::{gpu, naive_model, rounding};
use tandem::device::on_kernels;
use tandem::model::{LoadedModel, load};
use tandem::program::Far;
use tandem::tensor::Half;

/// The logits after a text, once for all texts of a run.
#[derive(Default)]
struct Said(RefCell<HashMap<(String, Vec<u32>), Vec<f32>>>);

impl Said {
    fn after(&self, m: &LoadedModel, text: &[u32]) -> Vec<f32> {
        let key = (m.spec.name.clone(), text.to_vec());
        if let Some(row) = self.0.borrow().get(&key) {
            return row.clone();
        }
        // Of all beginnings at once.
        let rows = naive_model::logits(&m.spec, &m.weights, Half::BF16, text);
        for (i, row) in rows.iter().enumerate() {
            let row = row.iter().map(|&x| x as f32).collect();
            self.0.borrow_mut().insert((m.spec.name.clone(), text[..=i].to_vec()), row);
        }
        self.0.borrow()[&key].clone()
    }

    /// No logits within the accelerator's bound of the model's make this token the likeliest, if its own is further from the best.
    fn judge(&self, m: &LoadedModel, text: &[u32], token: u32) -> Result<(), String> {
        let row = self.after(m, text);
        let (best, _, std) = rounding::lead(&row);
        let behind = f64::from(row[best as usize] - row[token as usize]) / std;
        let most = 3.0 * rounding::accelerator(&m.spec, Half::BF16, true);
        if behind > most {
            return Err(format!(
                "token {token} after {} tokens is {behind:.2} standard deviations behind {best}, at most {most:.2}",
                text.len()
            ));
        }
        Ok(())
    }
}

#[test]
fn any_order_of_requests_gives_tokens_of_the_model() {
    if !gpu::wanted("cuda") {
        return;
    }
    let Some(rt) = gpu::gpu() else { return };
    let models = ["micro_kernels", "micro_kernels_windows"].map(|name| {
        let spec = format!("{}/tests/fixtures/{name}.json", env!("CARGO_MANIFEST_DIR"));
        load(&format!("synth:{spec},dtype=bf16,seed=5")).expect("a model")
    });
    let given = |name: &str, otherwise: u64| {
        std::env::var(name).ok().map_or(otherwise, |n| n.parse().expect("a number"))
    };
    let acts = given("TANDEM_DEVICE_ACTS", u64::MAX) as usize;
    let first = given("TANDEM_DEVICE_FIRST", 0);
    let scripts = given("TANDEM_DEVICE_INTERLEAVINGS", gpu::count(&rt, (400, 3)));
    let accel = on_kernels(rt).expect("a runtime with kernels");
    let said = Said::default();
    let judge = Box::new(move |m: &LoadedModel, text: &[u32], token| said.judge(m, text, token));
    let mut world = World::on(Given { accel, models, judge });
    let watchdog = Watchdog::new(Duration::from_secs(300));
    for strategy in STRATEGIES {
        let mut all = Tally::default();
        for seed in first..first + scripts {
            let mut script = Script::of(seed, &[strategy], acts);
            if seed % 2 == 1 {
                // Nothing but the host's rows crosses the link, so they may take the copy lanes.
                let setup = &mut script.setup;
                (setup.on_host, setup.apart) = (0, 0);
                (setup.far, setup.copy_lane_rows) = (Far::Attend, 1);
            }
            watchdog.begin(seed);
            let tally = world.run(&script).unwrap_or_else(|e| panic!("seed {seed}: {e}\nof {script:?}"));
            all.add(&tally);
        }
        println!("{strategy}: {all:?}");
        assert!(all.tokens > 0, "{strategy}: {all:?}");
    }
    println!("{:?}", world.counts);
    // Few scripts may have none.
    let on_copy_lanes = world.counts.copy_lanes.load(Ordering::Relaxed);
    assert!(scripts < 6 || on_copy_lanes > 0, "no rows crossed on the copy lanes");
}
