//! The Python module `kvdelta`: one thin function a Rust one, errors as exceptions.

use pyo3::prelude::*;

#[pymodule]
mod kvdelta {
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
