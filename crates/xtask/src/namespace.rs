// SPDX-License-Identifier: Apache-2.0

//! A network namespace whose loopback has a rate, as a link between the processes in it.
//!
//! It has no name, so it ends with the last process in it, however that one ends, and takes its loopback's
//! settings along.

use std::fmt;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::process::Command;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::command;

/// That of Ethernet. A packet that is longer than the burst would never leave.
const MTU: &str = "1500";
/// How long a packet may wait before it is dropped.
const LATENCY: &str = "100ms";

/// Bits a second of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Rate {
    /// So many megabits.
    Mbit(NonZeroU32),
    /// What the machine's loopback does.
    Unshaped,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mbit(mbit) => write!(f, "{mbit} Mbit/s"),
            Self::Unshaped => f.write_str("unshaped"),
        }
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(mbit) => Ok(Self::Mbit(mbit)),
            Err(_) if text == "unshaped" => Ok(Self::Unshaped),
            Err(_) => Err("must be a number of Mbit/s above 0, or unshaped".to_owned()),
        }
    }
}

/// Why this process cannot make a shaped link; `None` if it can.
pub(crate) fn missing() -> Option<String> {
    if !geteuid().is_root() {
        return Some(format!("it needs root, this is user {}", geteuid()));
    }
    [("ip", "-V"), ("tc", "-V")]
        .into_iter()
        .find(|&(program, version)| run(program, &[version]).is_err())
        .map(|(program, _)| format!("it needs iproute2, there is no {program}"))
}

/// The loopback of this thread's namespace.
#[derive(Debug)]
pub(crate) struct Link(());

impl Link {
    /// Puts this thread, and the threads and processes that it starts from now on, into a namespace of their own.
    ///
    /// # Errors
    /// See [`missing`]; or the kernel has no network namespaces.
    pub(crate) fn enter() -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
        run("ip", &["link", "set", "lo", "mtu", MTU, "up"])?;
        Ok(Self(()))
    }

    /// Sets the rate, also in the middle of transfers.
    pub(crate) fn set_rate(&self, rate: Rate) -> Result<()> {
        let loopback = ["qdisc", "replace", "dev", "lo", "root"];
        let Rate::Mbit(mbit) = rate else {
            return run("tc", &[&loopback[..], &["noqueue"]].concat()).map(drop);
        };
        // What may pass at once: 2 ms of the rate, and well above the MTU; little beside a prompt's blocks.
        let burst = format!("{}kb", (mbit.get() / 4).max(32));
        let rate = format!("{mbit}mbit");
        let shape = ["tbf", "rate", &rate, "burst", &burst, "latency", LATENCY];
        run("tc", &[&loopback[..], &shape].concat()).map(drop)
    }

    /// The time that one TCP stream of so many bytes takes.
    pub(crate) fn stream(&self, bytes: usize) -> Result<Duration> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut sending = TcpStream::connect(listener.local_addr()?)?;
        let (mut receiving, _) = listener.accept()?;
        let began = Instant::now();
        thread::scope(|scope| {
            let receiver = scope.spawn(move || receiving.read_exact(&mut vec![0; bytes]));
            sending.write_all(&vec![0; bytes])?;
            let received = receiver.join();
            received.map_err(|_| io::Error::other("the receiver panicked"))?
        })
        .context("a stream over the loopback broke off")?;
        Ok(began.elapsed())
    }

    /// Bytes that it has carried so far, headers and all.
    pub(crate) fn bytes(&self) -> Result<u64> {
        // Of this thread's namespace, which is not the process's where a thread entered alone.
        let path = "/proc/thread-self/net/dev";
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
        received(&text).with_context(|| format!("{path} has no loopback"))
    }
}

/// Bytes that the loopback received, from the kernel's table.
fn received(table: &str) -> Option<u64> {
    let line = table
        .lines()
        .find_map(|line| line.trim().strip_prefix("lo:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(arguments);
    command::output(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_number_or_unshaped() {
        let shown = |text: &str| text.parse::<Rate>().map(|rate| rate.to_string());
        assert_eq!(shown("200").unwrap(), "200 Mbit/s");
        assert_eq!(shown("unshaped").unwrap(), "unshaped");
        for wrong in ["0", "-1", "1.5", "", "fast"] {
            assert!(shown(wrong).unwrap_err().contains("unshaped"), "{wrong}");
        }
    }

    #[test]
    fn the_loopback_is_found_in_the_kernels_table() {
        let table = "Inter-| Receive\n face |bytes packets\n  eth0: 5 1\n    lo: 1234 56 0\n";
        assert_eq!(received(table), Some(1234));
        assert_eq!(received("  eth0: 5 1\n"), None);
    }

    /// What a thread in a namespace of its own sees of its loopback after these rates: its discipline, and the
    /// bytes that a stream of so many bytes needs.
    fn seen_after(rates: &[Rate], bytes: usize) -> (String, u64) {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let link = Link::enter().unwrap();
                for rate in rates {
                    link.set_rate(*rate).unwrap();
                }
                let shaped = run("tc", &["qdisc", "show", "dev", "lo"]).unwrap();
                let before = link.bytes().unwrap();
                link.stream(bytes).unwrap();
                (shaped, link.bytes().unwrap() - before)
            });
            inside.join().unwrap()
        })
    }

    #[test]
    fn a_link_has_the_rate_that_was_set_last_and_counts_what_it_carries() {
        if let Some(why) = missing() {
            eprintln!("no link is tested here, only that there is none: {why}");
            assert!(thread::spawn(Link::enter).join().unwrap().is_err());
            return;
        }
        let own = || fs::read_link("/proc/thread-self/ns/net").unwrap();
        let before = own();
        let mbit = |mbit| Rate::Mbit(NonZeroU32::new(mbit).unwrap());
        let (shaped, carried) = seen_after(&[Rate::Unshaped, mbit(100), mbit(200)], 1 << 20);
        assert!(
            shaped.contains("tbf") && shaped.contains("rate 200Mbit"),
            "{shaped}"
        );
        assert!((1 << 20..5 << 18).contains(&carried), "{carried} bytes");
        let (unshaped, _) = seen_after(&[mbit(100), Rate::Unshaped], 1);
        assert!(!unshaped.contains("tbf"), "{unshaped}");
        assert_eq!(own(), before, "only the threads inside have left");
    }
}
