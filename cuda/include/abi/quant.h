// abi/quant.h    see ../abi.h
#pragma once
