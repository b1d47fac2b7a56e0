// abi/linear.h    see ../abi.h
#pragma once
