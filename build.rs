//! Under the `cuda` feature compiles the CUDA sources in src/kernel to PTX, for the compute capability in
//! `CUDA_COMPUTE_CAP` (90, say) or else of the GPU in this machine. Without the feature it does nothing.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    if let Err(why) = cuda::compile() {
        eprintln!(
            "the `cuda` feature compiles src/kernel/**/*.cu with nvcc: {why}\n\
             hint: eval \"$(.ci/cuda-toolchain)\" installs a compiler and sets CUDA_COMPUTE_CAP; without the \
             feature none is needed"
        );
        std::process::exit(1);
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::path::PathBuf;

    const SOURCES: [&str; 2] = ["src/kernel/quantized/dequantize.cu", "src/kernel/quantized/rows.cu"];
    const HEADERS: [&str; 1] = ["src/kernel/quantized/codes.cuh"];

    /// Writes OUT_DIR/NAME.ptx for each source, and OUT_DIR/ptx.rs with a constant for each.
    pub fn compile() -> Result<(), Box<dyn std::error::Error>> {
        let out = PathBuf::from(std::env::var("OUT_DIR")?);
        cudaforge::KernelBuilder::new()
            .source_files(SOURCES)
            .watch(HEADERS)
            .out_dir(&out)
            .args(["-O3", "-std=c++17"])
            .build_ptx()?
            .write(out.join("ptx.rs"))?;
        Ok(())
    }
}
