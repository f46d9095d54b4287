// SPDX-License-Identifier: Apache-2.0

//! Sets `cfg(kvdelta_patched)` when `KVDELTA_PATCHED` is 1.
//!
//! A flag in RUSTFLAGS would do the same and rebuild every dependency.

fn main() {
    println!("cargo::rerun-if-env-changed=KVDELTA_PATCHED");
    if std::env::var("KVDELTA_PATCHED").is_ok_and(|value| value == "1") {
        println!("cargo::rustc-cfg=kvdelta_patched");
    }
}
