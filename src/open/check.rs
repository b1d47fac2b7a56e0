//! Settings that contradict each other, found before a model is fetched or read.

use super::settings::{Device, Settings, Strategy};
use crate::device::{self, Emulation, Kind};
use crate::{Error, Result};

/// How many requests an engine is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requests {
    /// One at a time.
    One,
    /// Many, by one scheduler.
    Many,
    /// Many, by several schedulers one after the other.
    Compared,
}

impl Settings {
    /// Whether these settings make sense together, for an engine with these requests.
    ///
    /// # Errors
    /// [`Error::Usage`] if a device, strategy or limit cannot be honoured; as [`device::check`] if a requested device does
    /// not exist.
    pub fn check(&self, requests: Requests) -> Result<()> {
        let many = requests != Requests::One;
        if let Some(why) = self.of_many().filter(|_| !many) {
            return Err(Error::usage(why));
        }
        self.check_strategies(requests)?;
        let strategy = self.strategy();
        let name = strategy.name();
        let host = self.device == Device::Cpu;
        let on_cpu = host || self.device == Device::Auto || self.timed_machine().is_some();
        if strategy == Strategy::CpuOnly && !on_cpu {
            return Err(Error::usage(
                "`strategy` cpu-only: runs on the CPU; use `device` cpu, or emulated:HARDWARE for another machine's time",
            ));
        }
        if host && !matches!(strategy, Strategy::Auto | Strategy::CpuOnly) {
            return Err(Error::usage(format!(
                "`strategy` {name}: needs an accelerator; use `device` cuda, or `device` emulated to try it"
            )));
        }
        self.fixed.check_strategy(name)?;
        let moves = self.kv_pages.map(|_| "`kv_pages`").or(self.far.map(|_| "`far`"));
        let stays = strategy == Strategy::CpuOnly || strategy == Strategy::GpuOnly && !many;
        if let Some(setting) = moves.filter(|_| host || stays) {
            return Err(Error::usage(format!(
                "{setting}: with {} all keys and values stay where they are; use `strategy` helm, lia or stream on a device",
                if host { "`device` cpu".to_owned() } else { format!("`strategy` {name}") }
            )));
        }
        if self.gpu_memory.is_some() && (host || strategy == Strategy::CpuOnly) {
            return Err(Error::usage("`gpu_memory`: this runs on the CPU; leave it out"));
        }
        if self.gpu_memory == Some(0) {
            return Err(Error::usage("`gpu_memory`: 0 bytes; leave it out to use all"));
        }
        let functions = |kind: &Kind| kind.emulation() == Some(Emulation::Functions);
        if self.deterministic && self.kind().is_some_and(|kind| !functions(&kind)) {
            return Err(Error::usage(
                "`deterministic`: on an accelerator a result's rounding depends on the size of its batch; \
                 leave it out, or use `device` cpu or `device` emulated",
            ));
        }
        self.fixed.check_vectors()?;
        self.check_nodes(strategy)?;
        match self.kind() {
            Some(kind) if !self.falls_back() => device::check(&kind),
            _ => Ok(()),
        }
    }

    /// What of these settings only many requests have that share an engine.
    pub fn of_many(&self) -> Option<String> {
        match (self.learns_lengths, self.cohorts, self.strategy()) {
            (Some(_), ..) => Some("`learns_lengths`: of many requests".into()),
            (_, Some(n), _) => Some(format!("`cohorts` {n}: of many requests")),
            (_, _, s) if s.only_schedules() => {
                Some(format!("`strategy` {}: schedules many requests", s.name()))
            }
            _ => None,
        }
    }

    /// Several strategies are several schedulers, which are compared.
    fn check_strategies(&self, requests: Requests) -> Result<()> {
        let [_, second, ..] = self.strategies[..] else { return Ok(()) };
        if requests != Requests::Compared {
            return Err(Error::usage(format!(
                "`strategy`: one is wanted, and there is {}, too",
                second.name()
            )));
        }
        match self.strategies.iter().find(|s| !s.schedules()) {
            None => Ok(()),
            Some(other) => Err(Error::usage(format!(
                "`strategy` {}: cannot be compared with others, which schedule requests over one placement; use \
                 some of gpu-only, fastdecode, neo, apex and auto",
                other.name()
            ))),
        }
    }

    fn check_nodes(&self, strategy: Strategy) -> Result<()> {
        self.weights_binding()?;
        if let Device::Accelerator(Kind::Timed(_, machine)) = &self.device {
            self.with_weights(machine)?;
        }
        match self.weights_node.is_some() && strategy == Strategy::GpuOnly {
            true => Err(Error::usage(
                "`weights_node`: with `strategy` gpu-only no weights are on the host; leave one of them out",
            )),
            false => Ok(()),
        }
    }
}
