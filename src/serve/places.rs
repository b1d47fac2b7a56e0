//! Places in the queue: one for each sequence that runs or waits, of all clients together and of each key.

use std::sync::Arc;

use axum::extract::Request;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;

/// Whose a request is: the number of its key.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tenant(pub usize);

impl Tenant {
    /// Of a request that was let in.
    pub fn of(request: &Request) -> Tenant {
        request.extensions().get().copied().unwrap_or_default()
    }
}

/// See the [module](self).
pub(super) struct Places {
    all: Arc<Semaphore>,
    most: usize,
    /// Of each key, if one may not have all.
    keys: Vec<Arc<Semaphore>>,
    most_of_key: usize,
}

/// Places that are taken until it is dropped.
pub(super) struct Taken {
    _all: OwnedSemaphorePermit,
    _of_key: Option<OwnedSemaphorePermit>,
}

impl Places {
    /// So many, and so many at most of each of `keys` keys.
    pub fn new(most: usize, keys: usize, most_of_key: Option<usize>) -> Places {
        let most_of_key = most_of_key.map_or(most, |n| n.min(most));
        let of_key = |_| Arc::new(Semaphore::new(most_of_key));
        let keys = if most_of_key < most { (0..keys.max(1)).map(of_key).collect() } else { Vec::new() };
        Places { all: Arc::new(Semaphore::new(most)), most, keys, most_of_key }
    }

    /// How many there are.
    pub fn most(&self) -> usize {
        self.most
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.most - self.all.available_permits()
    }

    /// Takes a place for each answer, or refuses the request, whose `param` asks for so many: it would wait too long.
    ///
    /// # Errors
    /// If so many are not free (429), or never will be (400).
    pub fn take(&self, tenant: Tenant, answers: usize, param: &str) -> Result<Taken, ApiError> {
        let (n, most) = (answers, self.most_of_key);
        if n > most {
            let who = if most < self.most { "for one key, this server" } else { "this server" };
            let message = format!("{param}: {n} answers are asked for, {who} computes or queues {most}");
            return Err(ApiError::bad(param, message));
        }
        let of_key = self.keys.get(tenant.0).map(|key| key.clone().try_acquire_many_owned(n as u32));
        let of_key = of_key.transpose().map_err(|_| ApiError::key_queue_full(most))?;
        let all = self.all.clone().try_acquire_many_owned(n as u32);
        Ok(Taken { _all: all.map_err(|_| ApiError::queue_full(self.most))?, _of_key: of_key })
    }
}
