// SPDX-License-Identifier: Apache-2.0

//! A line for the waiting reader, on standard error.

use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_secs(3);

/// Says where the run is, at most every few seconds.
#[derive(Debug)]
pub struct Progress {
    began: Instant,
    said: Option<Instant>,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            said: None,
        }
    }
}

impl Progress {
    /// Says `what` unless something was said just now.
    pub fn say(&mut self, what: impl FnOnce() -> String) {
        if self.said.is_none_or(|said| said.elapsed() >= PAUSE) {
            self.said = Some(Instant::now());
            eprintln!("[{:>4} s] {}", self.began.elapsed().as_secs(), what());
        }
    }
}
