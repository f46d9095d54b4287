//! One state for several threads.

use std::sync::PoisonError;

use crate::sync::Mutex;

/// A [`Ledger`](crate::Ledger) or a [`Recovery`](crate::Recovery) that several threads use: in some engines the
/// scheduler and the notices of its workers are different ones.
#[derive(Debug, Default)]
pub struct Shared<T>(Mutex<T>);

impl<T> Shared<T> {
    /// Shares `state`.
    pub fn new(state: T) -> Self {
        Self(Mutex::new(state))
    }

    /// Does `call` while no other thread uses the state, which holds the lock: it must not come back here.
    pub fn with<R>(&self, call: impl FnOnce(&mut T) -> R) -> R {
        // No call of the state leaves it half changed, also where `call` itself panics.
        call(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
