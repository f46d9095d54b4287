// SPDX-License-Identifier: Apache-2.0

//! Ports for processes that want to be told where to listen.

use std::collections::HashSet;
use std::net::TcpListener;
use std::sync::{LazyLock, Mutex, PoisonError};

use anyhow::{Context, Result};

/// All ports given so far.
///
/// An engine listens on some of its ports seconds after its start: until then nothing but this set
/// knows that they are taken.
static GIVEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);

/// Ports that nothing listens on now and that no call before returned, all different.
///
/// Below the range from which systems take the ports of outgoing connections, and because
/// Dynamo reads DYN_SYSTEM_PORT as an i16.
pub(crate) fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut ports = [0; N];
    for port in &mut ports {
        *port = (0..1000)
            .map(|_| fastrand::u16(20_000..=32_767))
            .find(|port| !given.contains(port) && is_free(*port))
            .context("no free port was found between 20000 and 32767")?;
        given.insert(*port);
    }
    Ok(ports)
}

fn is_free(port: u16) -> bool {
    TcpListener::bind(("0.0.0.0", port)).is_ok()
}

/// `port` if nothing listens on it; it is given to no one else.
pub(crate) fn check_port(port: u16) -> Result<u16> {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    TcpListener::bind(("127.0.0.1", port)).with_context(|| format!("port {port} is taken"))?;
    given.insert(port);
    Ok(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_twice_though_nothing_listens_on_it() {
        let calls = (0..500).map(|_| free_ports::<3>().unwrap());
        let mut ports: Vec<u16> = calls.flatten().collect();
        assert!(ports.iter().all(|port| (20_000..32_768).contains(port)));
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 1500);
    }

    #[test]
    fn a_port_that_something_listens_on_is_not_free() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(!is_free(port));
        let error = check_port(port).unwrap_err().to_string();
        assert_eq!(error, format!("port {port} is taken"));
    }
}
