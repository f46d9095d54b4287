// SPDX-License-Identifier: Apache-2.0

//! Running another program to its end, its output in a log.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::progress::Step;

/// Lines of a log that an error shows.
const TAIL_LINES: usize = 30;

/// Runs `command` as the step `name`; its output goes to `log`, whose tail an error carries.
pub(crate) fn logged(name: &str, mut command: Command, log: &Path) -> Result<()> {
    let mut step = Step::begin(name);
    let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("cannot run {}", shown(&command)))?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        thread::sleep(Duration::from_millis(200));
        step.tick(&last_line(log));
    };
    if !status.success() {
        bail!(
            "{name} failed ({status}): {}\n{}\nThe whole log: {}",
            shown(&command),
            tail(log),
            log.display()
        );
    }
    step.end();
    Ok(())
}

/// Runs `command` with its output on the terminal.
pub(crate) fn shown_run(mut command: Command) -> Result<()> {
    eprintln!("$ {}", shown(&command));
    let status = command
        .status()
        .with_context(|| format!("cannot run {}", shown(&command)))?;
    if !status.success() {
        bail!("{} failed ({status})", shown(&command));
    }
    Ok(())
}

/// Runs `command` and returns what it printed.
pub(crate) fn output(mut command: Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", shown(&command)))?;
    if !output.status.success() {
        bail!(
            "{} failed ({}): {}",
            shown(&command),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The last lines of a log, indented.
pub(crate) fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..]
        .iter()
        .map(|line| format!("  | {line}\n"))
        .collect()
}

fn last_line(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rev().find(|line| !line.trim().is_empty());
    line.unwrap_or_default().trim().chars().take(100).collect()
}

fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
