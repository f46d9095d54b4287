// SPDX-License-Identifier: Apache-2.0

//! Running another program to its end, its output in a log.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::interrupt;
use crate::progress::Step;

/// Lines of a log that an error shows.
const TAIL_LINES: usize = 30;

/// Runs `command` as the step `name`; its output goes to `log`, whose tail an error carries.
pub(crate) fn logged(name: &str, mut command: Command, log: &Path) -> Result<()> {
    let status = logged_status(name, &mut command, log)?;
    if !status.success() {
        bail!(
            "{name} failed ({status}): {}\n{}\nThe whole log: {}",
            shown(&command),
            tail(log),
            log.display()
        );
    }
    Ok(())
}

/// Runs `command` with its output in `log`, whose tail an error carries.
pub(crate) fn quiet(mut command: Command, log: &Path) -> Result<()> {
    let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    command.stdout(output.try_clone()?).stderr(output);
    let status = wait(&mut command, || ())?;
    if !status.success() {
        bail!("{} failed ({status})\n{}", shown(&command), tail(log));
    }
    Ok(())
}

/// Runs `command` as the step `name` with its output in `log`, and returns how it ended.
pub(crate) fn logged_status(name: &str, command: &mut Command, log: &Path) -> Result<ExitStatus> {
    let mut step = Step::begin(name);
    let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    command.stdout(output.try_clone()?).stderr(output);
    let status = wait(command, || step.tick(&last_line(log)))?;
    if status.success() {
        step.end();
    }
    Ok(status)
}

/// Runs `command` with its output on the terminal, and returns how it ended.
pub(crate) fn shown_status(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("$ {}", shown(command));
    wait(command, || ())
}

/// Runs `command` with its output on the terminal.
pub(crate) fn shown_run(mut command: Command) -> Result<()> {
    let status = shown_status(&mut command)?;
    if !status.success() {
        bail!("{} failed ({status})", shown(&command));
    }
    Ok(())
}

/// Runs `command` in a process group of its own, which a signal to this command ends.
fn wait(command: &mut Command, mut tick: impl FnMut()) -> Result<ExitStatus> {
    let mut child = command
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if let Err(interrupted) = interrupt::check() {
            let group = Pid::from_raw(i32::try_from(child.id())?);
            // It may have ended since.
            let _ = killpg(group, Signal::SIGKILL);
            child.wait()?;
            return Err(interrupted);
        }
        thread::sleep(Duration::from_millis(100));
        tick();
    }
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
