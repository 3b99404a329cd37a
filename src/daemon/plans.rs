//! Plans that the daemon stores: a file each, named by the checksum of its contents.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;

use crate::error::{ErrorKind, chain};
use crate::ids::PlanId;
use crate::limits;
use crate::plan::format::{self, FormatError};
use crate::units::Bytes;

/// What is known of a stored plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) pool_len: Bytes,
    pub(super) requests: u64,
}

/// The plans in a directory.
#[derive(Debug)]
pub(super) struct PlanStore {
    directory: PathBuf,
    plans: DashMap<PlanId, Stored>,
    /// Numbers drafts: two callers may store the same plan at once.
    drafts: AtomicU64,
}

/// Why a plan is not stored, or not found.
#[derive(Debug, thiserror::Error)]
pub enum PlanStoreError {
    /// The directory or a file in it cannot be used.
    #[error("cannot use {path}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is no plan.
    #[error("this is no plan that can be used")]
    Format(#[from] FormatError),
    /// There is no such plan.
    #[error("there is no plan {}", .0.to_hex())]
    NoPlan(PlanId),
    /// There are as many as there may be.
    #[error("{} plans are stored, as many as there may be; delete some", limits::PLANS_MAX)]
    Full,
}

impl PlanStoreError {
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            PlanStoreError::File { .. } => ErrorKind::Broken,
            PlanStoreError::Format(error) => error.kind(),
            PlanStoreError::NoPlan(_) => ErrorKind::NotFound,
            PlanStoreError::Full => ErrorKind::Exhausted,
        }
    }
}

fn file(path: &Path) -> impl FnOnce(std::io::Error) -> PlanStoreError {
    let path = path.to_owned();
    move |source| PlanStoreError::File { path, source }
}

impl PlanStore {
    /// Opens a directory, made if it is not there. Files that are no plans are left alone and said so.
    pub(super) fn open(directory: PathBuf) -> Result<PlanStore, PlanStoreError> {
        std::fs::create_dir_all(&directory).map_err(file(&directory))?;
        let store = PlanStore { directory, plans: DashMap::new(), drafts: AtomicU64::new(0) };
        let entries = std::fs::read_dir(&store.directory).map_err(file(&store.directory))?;
        for entry in entries {
            let path = entry.map_err(file(&store.directory))?.path();
            let id = path.file_stem().and_then(|stem| stem.to_str()).and_then(PlanId::from_hex);
            let Some(id) = id.filter(|_| path.extension().is_some_and(|extension| extension == "plan")) else {
                continue;
            };
            match std::fs::read(&path).map_err(file(&path)).and_then(|bytes| Ok(format::read(&bytes)?)) {
                Ok(plan) if plan.id() == id => {
                    let name = std::fs::read_to_string(store.path(id, "name")).unwrap_or_default();
                    let requests = plan.entries.len() as u64;
                    store.plans.insert(id, Stored { name, pool_len: plan.pool_len, requests });
                }
                Ok(_) => tracing::warn!(path = %path.display(), "not the plan that its name says; left alone"),
                Err(error) => tracing::warn!(path = %path.display(), error = %chain(&error), "no plan; left alone"),
            }
        }
        Ok(store)
    }

    fn path(&self, id: PlanId, extension: &str) -> PathBuf {
        self.directory.join(id.to_hex()).with_extension(extension)
    }

    /// Stores a plan, if it is one. The same plan twice is the same plan.
    pub(super) fn put(&self, bytes: &[u8], name: String) -> Result<PlanId, PlanStoreError> {
        let plan = format::read(bytes)?;
        let id = plan.id();
        if self.plans.len() >= limits::PLANS_MAX && !self.plans.contains_key(&id) {
            return Err(PlanStoreError::Full);
        }
        // Whoever reads the directory sees the whole file or none.
        let draft = self.path(id, &format!("draft{}", self.drafts.fetch_add(1, Ordering::Relaxed)));
        let path = self.path(id, "plan");
        std::fs::write(self.path(id, "name"), &name).map_err(file(&path))?;
        std::fs::write(&draft, bytes).map_err(file(&draft))?;
        std::fs::File::open(&draft).and_then(|draft| draft.sync_all()).map_err(file(&draft))?;
        std::fs::rename(&draft, &path).map_err(file(&path))?;
        self.plans.insert(id, Stored { name, pool_len: plan.pool_len, requests: plan.entries.len() as u64 });
        Ok(id)
    }

    pub(super) fn get(&self, id: PlanId) -> Result<Vec<u8>, PlanStoreError> {
        if !self.plans.contains_key(&id) {
            return Err(PlanStoreError::NoPlan(id));
        }
        let path = self.path(id, "plan");
        std::fs::read(&path).map_err(file(&path))
    }

    pub(super) fn stored(&self, id: PlanId) -> Result<Stored, PlanStoreError> {
        self.plans.get(&id).map(|stored| stored.clone()).ok_or(PlanStoreError::NoPlan(id))
    }

    pub(super) fn list(&self) -> Vec<(PlanId, Stored)> {
        let mut plans: Vec<_> = self.plans.iter().map(|plan| (*plan.key(), plan.value().clone())).collect();
        plans.sort_by_key(|(id, _)| *id);
        plans
    }

    pub(super) fn delete(&self, id: PlanId) -> Result<(), PlanStoreError> {
        self.plans.remove(&id).ok_or(PlanStoreError::NoPlan(id))?;
        // The name is for people; a plan without one is still a plan.
        let _ = std::fs::remove_file(self.path(id, "name"));
        let path = self.path(id, "plan");
        std::fs::remove_file(&path).map_err(file(&path))
    }
}
