// SPDX-License-Identifier: Apache-2.0

//! What is being done and for how long, one line a step on standard error.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How often a long step says that it still runs.
pub(crate) const REPEAT: Duration = Duration::from_secs(15);

fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Prints a line with the time since the command began.
pub(crate) fn say(message: impl AsRef<str>) {
    let elapsed = start().elapsed().as_secs_f64();
    eprintln!("[{elapsed:7.1} s] {}", message.as_ref());
}

/// A step that may take long: said at its start, every [`REPEAT`], and at its end.
#[derive(Debug)]
pub(crate) struct Step {
    name: String,
    began: Instant,
    said: Instant,
}

impl Step {
    /// Begins a step.
    pub(crate) fn begin(name: impl Into<String>) -> Self {
        let name = name.into();
        say(format!("{name} ..."));
        let now = Instant::now();
        Self {
            name,
            began: now,
            said: now,
        }
    }

    /// Says that the step still runs, with `detail`, if it has been quiet for long.
    pub(crate) fn tick(&mut self, detail: &str) {
        if self.said.elapsed() >= REPEAT {
            self.said = Instant::now();
            say(format!(
                "{} ... {:.0} s {detail}",
                self.name,
                self.began.elapsed().as_secs_f64()
            ));
        }
    }

    /// Ends the step and returns how long it took.
    pub(crate) fn end(self) -> Duration {
        let took = self.began.elapsed();
        say(format!("{}: {:.1} s", self.name, took.as_secs_f64()));
        took
    }
}
