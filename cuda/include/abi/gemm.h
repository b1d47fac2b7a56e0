// abi/gemm.h    see ../abi.h
#pragma once
