//! Ports for tests whose servers listen later, or once more.

use std::net::TcpListener;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports that nothing listens on now, and that no other test of this process gets.
///
/// Below the range from which systems take ports on their own.
pub(super) fn free_ports<const N: usize>() -> [u16; N] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    [0; N].map(|_| {
        loop {
            let next = process::id().wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
            let port = 20_000 + u16::try_from(next % 12_000).unwrap();
            if TcpListener::bind(("127.0.0.1", port)).is_ok() {
                break port;
            }
        }
    })
}
