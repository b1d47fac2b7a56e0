//! The data that predictions of a run are based on: a description, timings of this machine, or a quick probe.

use std::sync::Arc;

use super::figures;
use super::settings::Settings;
use crate::device::{DeviceInfo, Kind};
use crate::hardware::{Hardware, named};
use crate::model::LoadedModel;
use crate::plan::{CostSource, Uncached};
use crate::profile::{
    EMULATED, ModelIdentity, Tables, Timings, estimate, estimate_cpu, measured_hardware, measured_tables,
    similar_device,
};
use crate::progress::Progress;
use crate::{Error, Result};

/// See the [module](self).
pub(super) struct Basis {
    pub hardware: Hardware,
    /// Timings of the real kernels, if this model was profiled here.
    pub tables: Option<Tables>,
    /// The machine whose times these are, if not this machine.
    pub whose: Option<String>,
    /// What they come from, for people.
    pub from: String,
}

impl Basis {
    /// The machine with this device, or without one: from the settings' description, from a measurement, or from a quick
    /// probe; with weights on the wanted memory nodes, if anything is known of them. `None`: without a device, of a CPU that cannot
    /// be probed.
    ///
    /// # Errors
    /// A description that cannot be read, or has no GPU.
    pub fn of(
        settings: &Settings,
        model: &LoadedModel,
        device: Option<(&Kind, &DeviceInfo)>,
        progress: &dyn Progress,
    ) -> Result<Option<Basis>> {
        let Some(basis) = figures_of(settings, model, device, progress)? else { return Ok(None) };
        if basis.hardware.weights.is_some() {
            return Ok(Some(basis));
        }
        let hardware = settings.with_weights(&basis.hardware).unwrap_or_else(|_| {
            progress.note(
                "`weights_node`: the speed of these nodes is not known, and predictions take weights to be in the CPU's own \
                 memory; tandem profile measures it",
            );
            basis.hardware.clone()
        });
        Ok(Some(Basis { hardware, ..basis }))
    }

    /// Costs: timings if there are any.
    pub fn source(hardware: Hardware, tables: Option<Tables>) -> Arc<dyn CostSource> {
        match tables {
            Some(tables) => Arc::new(Timings::new(hardware, tables)),
            None => Arc::new(hardware),
        }
    }

    /// Costs for many threads of few questions each.
    pub fn uncached(self) -> Arc<dyn CostSource> {
        match self.tables {
            Some(_) => Basis::source(self.hardware, self.tables),
            None => Arc::new(Uncached(self.hardware)),
        }
    }
}

/// The same with all weights in the CPU's own memory.
fn figures_of(
    settings: &Settings,
    model: &LoadedModel,
    device: Option<(&Kind, &DeviceInfo)>,
    progress: &dyn Progress,
) -> Result<Option<Basis>> {
    if settings.hardware != "auto" {
        let name = &settings.hardware;
        let model = ModelIdentity::of(&model.spec, &model.weights, &model.source);
        let (hardware, tables) = figures::hardware(name, Some(&model), progress)?;
        if let (None, Some((_, info))) = (hardware.accelerator, device) {
            return Err(Error::usage(format!(
                "`hardware` {name}: describes no GPU, and this is to run on {}",
                info.name
            )));
        }
        let from = format!("`hardware` {name}");
        let whose = Some(hardware.name.clone());
        return Ok(Some(Basis { hardware, tables, whose, from }));
    }
    if let Some(machine) = settings.timed_machine() {
        let (hardware, name) = (Hardware::clone(&machine), machine.name.clone());
        let from = format!("the machine of `device` emulated:{name}");
        return Ok(Some(Basis { hardware, tables: None, whose: Some(name), from }));
    }
    let info = device.map(|(_, info)| info);
    let there = |h: &Hardware| info.is_none() || h.accelerator.is_some();
    if let Some(hardware) = measured_hardware(info).filter(there) {
        let tables = measured_tables(info, &model.spec, &model.weights, &model.source);
        let from = match tables {
            Some(_) => "timings of this model on this machine",
            None => "limits measured on this machine",
        };
        return Ok(Some(Basis { hardware, tables, whose: None, from: from.into() }));
    }
    let Some(info) = info else {
        let from = "a probe of this CPU; tandem profile measures".to_owned();
        let probed = estimate_cpu(settings.threads);
        return Ok(probed.map(|hardware| Basis { hardware, tables: None, whose: None, from }));
    };
    // Where nothing can be probed, all figures are those of a description.
    let described = || named(EMULATED).expect("a description of Tandem's own");
    let probed = estimate(info, settings.threads).unwrap_or_else(described);
    let like = similar_device(info);
    let from = match like {
        Some(like) => {
            let share =
                info.slice().map_or(String::new(), |slice| format!("the share of a slice ({slice}) in "));
            format!("a probe of this CPU and {share}the figures of {like}; tandem profile measures")
        }
        None => {
            format!("a probe of this CPU and what the driver says of {}; tandem profile measures", info.name)
        }
    };
    // An emulated device stands in for another machine's GPU.
    let whose = like.filter(|_| info.driver == 0).map(|like| format!("the GPU of {like}"));
    Ok(Some(Basis { hardware: probed, tables: None, whose, from }))
}
