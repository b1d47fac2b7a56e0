//! Profiles as files: in the cache folder by what they are of, and wherever `-o` says.
//!
//! ```text
//! $TANDEM_HOME/profiles/<key>.json     of a machine, a device and perhaps a model: the key is a hash of them
//! ```

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::calibrate::Calibration;
use super::identity::{Identity, SCHEMA};
use super::limits::Limits;
use super::tables::Tables;
use crate::hub::Cache;
use crate::{Error, Result, atomic_file, small_file};

/// Most bytes of a profile's file.
const MAX_BYTES: u64 = 16 << 20;

/// What was measured on a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// What was measured.
    pub identity: Identity,
    /// Whether it was made in a hurry: fewer and smaller probes.
    pub quick: bool,
    /// The machine's limits.
    pub limits: Limits,
    /// The model's operations, if they were timed.
    pub model: Option<ModelProfile>,
}

/// What was measured of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelProfile {
    /// Seconds of its operations.
    pub tables: Tables,
    /// Real steps against predicted ones, of each side.
    pub calibration: Calibration,
}

/// The first fields of any profile, whatever else its version has.
#[derive(Deserialize)]
struct Head {
    identity: HeadIdentity,
}

#[derive(Deserialize)]
struct HeadIdentity {
    schema: u32,
    version: String,
}

impl Profile {
    /// Reads a profile's text; `file` is its name for messages.
    ///
    /// # Errors
    /// [`Error::Format`]: no JSON, another schema, or figures that no machine has.
    pub fn parse(file: &str, text: &str) -> Result<Profile> {
        let broken = |e: serde_json::Error| Error::format(file, format!("not a profile: {e}"));
        let head: Head = serde_json::from_str(text).map_err(broken)?;
        if head.identity.schema != SCHEMA {
            return Err(Error::format(
                file,
                format!(
                    "a profile of schema {} (Tandem {}), this version reads {SCHEMA}; run tandem profile again",
                    head.identity.schema, head.identity.version
                ),
            ));
        }
        let profile: Profile = serde_json::from_str(text).map_err(broken)?;
        profile.limits.check(file)?;
        if let Some(model) = &profile.model {
            model.tables.check(file)?;
        }
        Ok(profile)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Io`]; a file that is too long for a profile; as [`Profile::parse`].
    pub fn read(path: &Path) -> Result<Profile> {
        let text = small_file::read_text(path, MAX_BYTES)?.ok_or_else(|| small_file::missing(path))?;
        Profile::parse(&path.display().to_string(), &text)
    }

    /// Reads a file that has to be of this machine, device and version.
    ///
    /// # Errors
    /// As [`Profile::read`]; [`Error::Usage`] that names what differs.
    pub fn read_for(path: &Path, wanted: &Identity) -> Result<Profile> {
        let profile = Profile::read(path)?;
        match profile.identity.difference(wanted) {
            None => Ok(profile),
            Some(difference) => Err(Error::usage(format!(
                "{}: a profile of something else: {difference}; run tandem profile here",
                path.display()
            ))),
        }
    }

    /// Writes all of it, or nothing.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("numbers and strings");
        atomic_file::replace(path, |to| to.write_all(text.as_bytes()).and_then(|()| to.write_all(b"\n")))
    }
}

/// The profiles of the cache folder.
#[derive(Debug, Clone)]
pub struct ProfileStore {
    folder: PathBuf,
}

impl ProfileStore {
    /// The store in the folder that the environment names.
    ///
    /// # Errors
    /// As [`Cache::from_env`].
    pub fn from_env() -> Result<ProfileStore> {
        Ok(ProfileStore::at(Cache::from_env()?.home()))
    }

    /// The store in the cache folder `home`.
    pub fn at(home: &Path) -> ProfileStore {
        ProfileStore { folder: home.join("profiles") }
    }

    /// The folder of all profiles.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the profile of `identity` belongs.
    pub fn path(&self, identity: &Identity) -> PathBuf {
        self.folder.join(format!("{}.json", identity.key()))
    }

    /// The profile of `identity`, if there is one.
    ///
    /// # Errors
    /// A file that is there and is damaged, or that is another machine's.
    pub fn load(&self, identity: &Identity) -> Result<Option<Profile>> {
        let path = self.path(identity);
        if !path.exists() {
            return Ok(None);
        }
        Profile::read_for(&path, identity).map(Some)
    }

    /// Keeps `profile`, in the place of an older one; returns where.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, profile: &Profile) -> Result<PathBuf> {
        std::fs::create_dir_all(&self.folder).map_err(|e| Error::io(&self.folder, e))?;
        let path = self.path(&profile.identity);
        profile.write(&path)?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::{
        Bandwidth, CopyLoad, CpuLimits, DeviceLimits, HandOver, HostAttention, LinkLimits, Rate,
    };
    use super::*;

    fn profile() -> Profile {
        let rate = |name: &str, ops_s| Rate { name: name.into(), ops_s };
        let link = LinkLimits { latency_s: 1e-5, pinned_bw: 25e9, pageable_bw: 8e9, busy_bw: 20e9 };
        Profile {
            identity: Identity::of_machine(None),
            quick: true,
            model: None,
            limits: Limits {
                cpu: CpuLimits {
                    threads: 2,
                    memory_bytes: 16 << 30,
                    llc_bytes: 32 << 20,
                    read_bytes: 1 << 30,
                    read: [1, 2]
                        .map(|threads| Bandwidth { threads, bytes_s: 12e9 * f64::from(threads) })
                        .into(),
                    peaks: vec![rate("f32 fma", 2e11)],
                    matrix: vec![rate("avx2", 1e11), rate("avx512", 3e11)],
                    nodes: vec![],
                },
                host_attention: HostAttention {
                    threads: 2,
                    alone_bw: 20e9,
                    beside_copies_bw: 15e9,
                    copies: CopyLoad::Link,
                },
                hand_over: HandOver { spinning_s: 1e-6, parked_s: 2e-5, in_step_s: Some(2e-6), lane: None },
                device: Some(DeviceLimits {
                    name: "Tesla T4".into(),
                    memory_bytes: 16 << 30,
                    copy_bw: 240e9,
                    matrix_flops: 40e12,
                    launch_s: 3e-6,
                    step_s: 2e-6,
                    round_trip_s: 9e-6,
                    wake_s: 40e-6,
                    lane_wait_s: 6e-6,
                    to_device: link,
                    to_host: LinkLimits { latency_s: 2e-5, pinned_bw: 24e9, ..link },
                }),
            },
        }
    }

    #[test]
    fn what_is_saved_is_loaded_again_and_nothing_else() {
        let home = tempfile::tempdir().unwrap();
        let (store, profile) = (ProfileStore::at(home.path()), profile());
        assert_eq!(store.load(&profile.identity).unwrap(), None);
        let path = store.save(&profile).unwrap();
        assert_eq!(store.load(&profile.identity).unwrap().as_ref(), Some(&profile));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file stays");
        let other = Identity { threads: 77, ..profile.identity.clone() };
        assert_eq!(store.load(&other).unwrap(), None);
        // A file that was copied to another machine's name.
        std::fs::copy(&path, store.path(&other)).unwrap();
        let said = store.load(&other).unwrap_err().to_string();
        assert!(said.contains("something else: threads is") && said.contains("and 77 here"), "{said}");
    }

    #[test]
    fn planners_read_what_kernels_reach() {
        let h = profile().limits.hardware("this");
        assert_eq!(h.efficiency.cpu_beside_copies, 0.75);
        assert_eq!((h.cpu.cores, h.cpu.read_bw, h.cpu.flops_bf16), (2, 24e9, 3e11));
        let (gpu, link) = h.accelerator.unwrap();
        assert_eq!((gpu.bw, gpu.flops_bf16, link.h2d_bw, link.latency_s), (240e9, 40e12, 25e9, 2e-5));
    }

    /// Whatever is in the file: an error that names it, and no panic.
    #[test]
    fn damaged_files_are_errors() {
        let text = serde_json::to_string_pretty(&profile()).unwrap();
        let parse = |text: &str| Profile::parse("p.json", text);
        assert_eq!(parse(&text).unwrap(), profile());
        for end in 0..text.len() {
            assert!(parse(&text[..end]).is_err(), "cut at byte {end}");
        }
        let replaced = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            parse(&text.replace(from, to)).unwrap_err().to_string()
        };
        let said = replaced(&format!("\"schema\": {SCHEMA}"), "\"schema\": 999");
        assert!(
            said.contains("p.json: a profile of schema 999 (Tandem ") && said.contains("again"),
            "{said}"
        );
        for (from, to, field) in [
            ("\"copy_bw\": 240000000000.0", "\"copy_bw\": -1", "limits.device.copy_bw: -1"),
            ("\"copy_bw\": 240000000000.0", "\"copy_bw\": 1e300", "limits.device.copy_bw"),
            ("\"copy_bw\": 240000000000.0", "\"copy_bw\": 1e999", "p.json: not a profile"),
            ("\"copy_bw\": 240000000000.0", "\"copy_bw\": null", "p.json: not a profile"),
            ("\"threads\": 2", "\"threads\": -2", "p.json: not a profile"),
            ("\"llc_bytes\"", "\"llc_bites\"", "unknown field"),
        ] {
            let said = replaced(from, to);
            assert!(said.contains(field), "{to}: {said}");
        }
        assert!(parse("[]").is_err() && parse("").is_err() && parse(&"[".repeat(100_000)).is_err());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.json");
        std::fs::File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert!(Profile::read(&path).unwrap_err().to_string().contains("bytes, at most"));
        std::fs::write(&path, b"\xff\xfe{}").unwrap();
        assert!(Profile::read(&path).unwrap_err().to_string().contains("not UTF-8 text"));
    }
}
